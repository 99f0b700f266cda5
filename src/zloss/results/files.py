"""Results on disk: every file is opened by the record of its schema."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from zloss.errors import InputError
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.drift import Drift
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.io import read_json, write_json
from zloss.results.loss_audit import LossAudit
from zloss.results.recommendation import Recommendation
from zloss.results.record import ResultRecord
from zloss.results.reproduction import ReproductionRecord
from zloss.results.router import MeasuredScale, RouterScaleTable

Kind = Literal[
    "audit",
    "loss-audit",
    "comparison",
    "router-scale",
    "measured-router-scale",
    "reproduction",
    "implementation-audit",
    "drift",
    "recommendation",
]
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
KINDS: dict[type[Reported], Kind] = {
    AuditReport: "audit",
    LossAudit: "loss-audit",
    Comparison: "comparison",
    RouterScaleTable: "router-scale",
    MeasuredScale: "measured-router-scale",
    ReproductionRecord: "reproduction",
    ImplementationAudit: "implementation-audit",
    Drift: "drift",
    Recommendation: "recommendation",
}
RECORDS: dict[str, type[Reported]] = {record.SCHEMA: record for record in KINDS}
"""Schema → record."""
Read = TypeVar("Read", bound=ResultRecord)
Joined = TypeVar("Joined", bound=Reported)


@dataclass(frozen=True)
class Result:
    """One result and where it was read from."""

    path: Path
    record: Reported

    @property
    def kind(self) -> Kind:
        """The kind of result, as its schema names it."""
        return KINDS[type(self.record)]


def load_results(paths: Iterable[Path]) -> list[Result]:
    """Every result named by a file, or found as JSON directly inside a named folder."""
    return [result for path in paths for result in _load(path)]


def split_results(
    results: Iterable[Result],
) -> tuple[tuple[AuditReport, ...], tuple[LossAudit, ...], tuple[Comparison, ...]]:
    """(audits, audits of losses, comparisons), each in the given order."""
    records = [result.record for result in results]
    if not records:
        raise InputError("no result was given: pass a folder that `zloss audit` has written.")
    return (
        tuple(record for record in records if isinstance(record, AuditReport)),
        tuple(record for record in records if isinstance(record, LossAudit)),
        tuple(record for record in records if isinstance(record, Comparison)),
    )


def records_of(results: Iterable[Result], record_type: type[Joined]) -> tuple[Joined, ...]:
    """The records of one kind, in the given order."""
    return tuple(result.record for result in results if isinstance(result.record, record_type))


def read_record(path: Path, record_type: type[Read]) -> Read:
    """The record in the file `path`; a file that is not of the schema is refused by its name and its key."""
    return _record(path, record_type, _read(path))


def write_record(path: Path, record: ResultRecord) -> None:
    """Write the file of a record; it appears whole or not at all."""
    write_json(path, record.to_dict())


def _read(path: Path) -> Any:
    """Parsed JSON of a file."""
    return read_json(path, advice="run the command that wrote it again")


def _load(path: Path) -> list[Result]:
    if path.is_dir():
        found = [result for file in sorted(path.glob("*.json")) if (result := _result(file)) is not None]
        if not found:
            raise InputError(
                f"{path} holds no result: expected a report.json of `zloss audit` or a comparison.json of `zloss compare`, "
                "or another JSON file that zloss has written."
            )
        return found
    if not path.exists():
        raise InputError(f"there is no file or folder {path}: pass a folder that `zloss audit` has written.")
    result = _result(path)
    if result is None:
        data = _read(path)
        schema = data.get("schema") if isinstance(data, dict) else None
        known = ", ".join(RECORDS)
        raise InputError(f"{path} is not a result of zloss: its schema is {schema!r}, known are {known}.")
    return [result]


def _result(file: Path) -> Result | None:
    """The result in `file`; None for other JSON. A known kind in another version is an error."""
    data = _read(file)
    schema = data.get("schema") if isinstance(data, dict) else None
    for known, record_type in RECORDS.items():
        if schema == known:
            return Result(file, _record(file, record_type, data))
        if isinstance(schema, str) and _kind(schema) == _kind(known):
            raise InputError(f"{file} has schema {schema!r}; this version reads {known}.")
    return None


def _record(path: Path, record_type: type[Read], data: Any) -> Read:
    try:
        return record_type.from_dict(data)
    except InputError as error:
        raise InputError(f"{path} is not a readable {_kind(record_type.SCHEMA)}: {error}") from error


def _kind(schema: str) -> str:
    return schema.partition("/")[0].removeprefix("zloss.")
