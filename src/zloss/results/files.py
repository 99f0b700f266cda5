"""Results on disk: audits, audits of losses, comparisons of training runs, told apart by their schema."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from zloss.errors import InputError
from zloss.results.audit import AuditReport

Kind = Literal["audit", "loss-audit", "comparison"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VERSION = "1"


@dataclass(frozen=True)
class Result:
    """One parsed result file."""

    path: Path
    kind: Kind
    data: dict[str, Any]

    def audit(self) -> AuditReport:
        """The typed report of an audit."""
        try:
            return AuditReport.from_dict(self.data)
        except InputError as error:
            raise InputError(f"{self.path} is not a readable audit: {error}") from error


def load_results(paths: Iterable[Path]) -> list[Result]:
    """Every result named by a file, or found as JSON directly inside a named folder."""
    return [result for path in paths for result in _load(path)]


def _load(path: Path) -> list[Result]:
    if path.is_dir():
        found = [result for file in sorted(path.glob("*.json")) if (result := _parse(file, strict=False)) is not None]
        if not found:
            raise InputError(
                f"{path} holds no result: expected a report.json of `zloss audit` or a comparison.json of `zloss compare`."
            )
        return found
    if not path.exists():
        raise InputError(f"there is no file or folder {path}: pass a folder that `zloss audit --out` has written.")
    result = _parse(path, strict=True)
    assert result is not None
    return [result]


def _parse(file: Path, *, strict: bool) -> Result | None:
    """The result in `file`; None for another kind of JSON unless `strict`, when it is an error."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(
            f"{file} is not JSON ({error}): it may be cut off; run the command that wrote it again."
        ) from error
    if isinstance(data, dict):
        name, _, version = str(data.get("schema", "")).partition("/")
        for kind in KINDS:
            if name == f"zloss.{kind}":
                if version != VERSION:
                    raise InputError(
                        f"{file} has schema {data['schema']!r}; this version reads zloss.{kind}/{VERSION}."
                    )
                return Result(file, kind, data)
        if "schema" not in data and "quality" in data:
            return Result(file, "comparison", data)
    if strict:
        schema = data.get("schema") if isinstance(data, dict) else None
        known = ", ".join(f"zloss.{kind}/{VERSION}" for kind in KINDS)
        raise InputError(f"{file} is not a result of zloss: its schema is {schema!r}, known are {known}.")
    return None
