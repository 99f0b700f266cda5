"""Lines of a table, the paper's or ours, in one form: a claim that reads one can read the other.

The paper's tables are data (`data/tables.json`): an entry names its columns and lines (under `rows`), the settings the paper
states, and in `not_stated` those it does not. A printed cell may be off by half a unit of its last digit; a measured one is
taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any

from zloss.errors import UnknownNameError

Key = str | int | float


@dataclass(frozen=True)
class Cell:
    """A number with its rounding: the truth lies in value ± half_unit."""

    value: float
    half_unit: float = 0.0
    printed: str = ""
    """As the paper prints it; empty for a measured number."""

    @property
    def low(self) -> float:
        return self.value - self.half_unit

    @property
    def high(self) -> float:
        return self.value + self.half_unit


@dataclass(frozen=True)
class Line:
    """One line of a table: its key, and its numbers by column; a number that does not exist is absent, with a reason."""

    key: Mapping[str, Key]
    cells: Mapping[str, Cell]
    reasons: Mapping[str, str] = field(default_factory=dict)
    deviations: tuple[str, ...] = ()
    """What keeps the numbers from being comparable with the paper's, one sentence each; claims may still be tested."""
    beside: Mapping[str, Key] = field(default_factory=dict)
    """Key of the paper's line next to which it is printed; empty: the line of the same key."""
    by_seed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Numbers of the single runs behind the line, in the order of the seeds; for claims about every run."""

    def name(self, *, without: str = "") -> str:
        """ "GPT-2, raw"."""
        return ", ".join(str(value) for column, value in self.key.items() if column != without)


@dataclass(frozen=True)
class Table:
    """All lines of one side."""

    lines: tuple[Line, ...]

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def find(self, **key: Key) -> tuple[Line, ...]:
        """Lines whose key holds all of `key`."""
        return tuple(line for line in self.lines if all(line.key.get(name) == value for name, value in key.items()))

    def pairs(self, column: str, low: Key, high: Key) -> list[tuple[Line, Line]]:
        """Every two lines that differ in `column` alone: the one at `low`, the one at `high`."""
        return [
            (first, second)
            for first in self.find(**{column: low})
            for second in self.find(**{**first.key, column: high})
        ]


def cells_from(record: object, columns: Mapping[str, str]) -> dict[str, Cell]:
    """Cells of the numbers that a record has, by column and attribute; the dot in `delta_src.mean` leads into a record."""
    values: dict[str, float | None] = {}
    for column, path in columns.items():
        value: Any = record
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        values[column] = value
    return cells_of(values)


def cells_of(values: Mapping[str, float | None]) -> dict[str, Cell]:
    """Cells of the numbers that exist."""
    return {column: Cell(float(value)) for column, value in values.items() if value is not None}


@dataclass(frozen=True)
class PaperTable:
    """One table, figure or passage of the paper."""

    label: str
    title: str
    table: Table
    config: Mapping[str, Any]
    """The settings that the paper states."""
    not_stated: tuple[str, ...]


def paper_table(label: str, *number_keys: str) -> PaperTable:
    """The entry `label`; text columns and `number_keys` are the key of a line, all others its numbers."""
    entries = _entries()
    if label not in entries:
        raise UnknownNameError("table of the paper", label, entries)
    entry = entries[label]
    return PaperTable(
        label=label,
        title=entry["title"],
        table=Table(tuple(_line(record, number_keys) for record in entry["rows"])),
        config=_plain(entry["config"]),
        not_stated=tuple(entry["not_stated"]),
    )


@cache
def _entries() -> dict[str, Any]:
    text = resources.files("zloss_paper").joinpath("data/tables.json").read_text(encoding="utf-8")
    # Decimals keep the printed trailing zeros, and with them the rounding unit.
    entries: dict[str, Any] = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    return entries


def _line(record: Mapping[str, Any], number_keys: tuple[str, ...]) -> Line:
    key: dict[str, Key] = {}
    cells: dict[str, Cell] = {}
    for column, value in record.items():
        if isinstance(value, str) or column in number_keys:
            key[column] = _plain(value)
        elif isinstance(value, Decimal):
            # 28.00 was rounded to hundredths, so its half unit is 0.005; tables hold no NaN.
            cells[column] = Cell(float(value), 0.5 * 10.0 ** int(value.as_tuple().exponent), str(value))
    return Line(key, cells, {column: "not printed" for column, value in record.items() if value is None})


def _plain(value: Any) -> Any:
    """Decimals as int or float."""
    if isinstance(value, Decimal):
        return float(value) if value.as_tuple().exponent else int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
