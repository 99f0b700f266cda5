"""compat.json: the outcomes with what was stated when they were written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.compat.outcome import Outcome
from tools.compat.rows import EXTRAS, ROWS, ranges
from tools.compat.selection import FILES

SCHEMA = "zloss.compat/1"


@dataclass(frozen=True)
class Record:
    """All of compat.json but its schema."""

    stated: dict[str, str]
    """Distribution → the range in pyproject.toml."""
    extras: tuple[str, ...]
    files: int
    """Files and folders of tests in the selection."""
    rows: tuple[Outcome, ...]


def current_record(outcomes: Iterable[Outcome]) -> Record:
    """Outcomes in the order of the rows; of two with the same row the later one."""
    last = {outcome.row: outcome for outcome in outcomes}
    return Record(ranges(), EXTRAS, len(FILES), tuple(last[row.name] for row in ROWS if row.name in last))


def read_record(out: Path) -> Record | None:
    """The record of earlier calls, where there is one."""
    file = out.with_suffix(".json")
    if not file.is_file():
        return None
    read = json.loads(file.read_text(encoding="utf-8"))
    rows = tuple(Outcome(**{**row, "failures": tuple(row["failures"])}) for row in read["rows"])
    return Record(read["stated"], tuple(read["extras"]), read["files"], rows)


def write_record(out: Path, record: Record) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, **asdict(record)}, indent=1, ensure_ascii=False)
    out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
