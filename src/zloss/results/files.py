"""Results on disk: every file is opened by the record of its schema."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from zloss.errors import InputError
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.drift import Drift
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.io import read_json
from zloss.results.loss_audit import LossAudit
from zloss.results.recommendation import Recommendation
from zloss.results.record import ResultRecord
from zloss.results.reproduction import ReproductionRecord
from zloss.results.router import MeasuredScale, RouterScaleTable

Reported = (
    AuditReport
    | LossAudit
    | Comparison
    | RouterScaleTable
    | MeasuredScale
    | ReproductionRecord
    | ImplementationAudit
    | Drift
    | Recommendation
)
"""What `zloss report` joins."""
Read = TypeVar("Read", bound=ResultRecord)


def kind_of(schema: str) -> str:
    """The kind of result that a schema names.

    >>> kind_of("zloss.loss-audit/2")
    'loss-audit'
    """
    return schema.partition("/")[0].removeprefix("zloss.")


RECORDS: dict[str, type[Reported]] = {record.SCHEMA: record for record in get_args(Reported)}
"""Schema → record."""
PLURALS: dict[type[Reported], str] = {
    record: f"{kind_of(schema).replace('-', '_')}s" for schema, record in RECORDS.items()
}
PLURALS[MeasuredScale] = "measured_routers"
"""Record → the name of all results of its kind."""


@dataclass(frozen=True)
class Result:
    """One result and where it was read from."""

    path: Path
    record: Reported

    @property
    def kind(self) -> str:
        """The kind of result, as its schema names it."""
        return kind_of(self.record.SCHEMA)


def load_results(paths: Iterable[Path]) -> list[Result]:
    """Every result named by a file, or found as JSON directly inside a named folder; there must be one."""
    found = [result for path in paths for result in _load(path)]
    if not found:
        raise InputError("no result was given: pass a folder that `zloss audit` has written.")
    return found


def read_record(path: Path, record_type: type[Read]) -> Read:
    """The record in the file `path`; a file that does not match the schema raises an error with its name and key."""
    return _record(path, record_type, _read(path))


def _read(path: Path) -> Any:
    return read_json(path, advice="run the command that wrote it again")


def _record(path: Path, record_type: type[Read], data: Any) -> Read:
    try:
        return record_type.from_dict(data)
    except InputError as error:
        raise InputError(f"{path} is not a readable {kind_of(record_type.SCHEMA)}: {error}") from error


def _load(path: Path) -> list[Result]:
    """The results of a file or a folder; other JSON files in a folder are skipped; a known kind in another version is an
    error."""
    if not path.exists():
        raise InputError(f"{path} does not exist: pass a folder that `zloss audit` has written.")
    found = []
    known = {kind_of(schema): schema for schema in RECORDS}
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        data = _read(file)
        schema = data.get("schema") if isinstance(data, dict) else None
        if str(schema) in RECORDS:
            found.append(Result(file, _record(file, RECORDS[str(schema)], data)))
        elif kind_of(str(schema)) in known:
            raise InputError(
                f"{file} has schema {schema!r}, but this version reads {known[kind_of(str(schema))]}: run the command that wrote "
                "it again."
            )
        elif file == path:
            raise InputError(
                f"{path} is not a zloss result: its schema is {schema!r}, expected one of {', '.join(RECORDS)}."
            )
    if not found:
        raise InputError(
            f"{path} contains no result: expected a report.json of `zloss audit` or a comparison.json of `zloss compare`, "
            "or another JSON file that zloss has written."
        )
    return found
