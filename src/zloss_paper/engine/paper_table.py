"""The paper's tables as data (`data/tables.json`), with the rounding of every printed cell.

An entry names its columns and lines (under `rows`), the settings the paper states, and in `not_stated` those it does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any

from zloss.errors import UnknownNameError
from zloss_paper.engine.table import Cell, Key, Line, Table


@dataclass(frozen=True)
class PaperTable:
    """One table, figure or passage of the paper."""

    label: str
    title: str
    columns: tuple[str, ...]
    table: Table
    config: Mapping[str, Any]
    not_stated: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def key_columns(self) -> tuple[str, ...]:
        """Columns of the key of a line."""
        return tuple(self.table.lines[0].key)


def paper_table(label: str, *, integer_keys: tuple[str, ...] = (), number_keys: tuple[str, ...] = ()) -> PaperTable:
    """The entry `label`; text columns, `integer_keys` and `number_keys` are the key of a line, all others its numbers."""
    entries = _entries()
    if label not in entries:
        raise UnknownNameError("table of the paper", label, entries)
    entry = entries[label]
    return PaperTable(
        label=label,
        title=entry["title"],
        columns=tuple(entry["columns"]),
        table=Table(tuple(_line(record, integer_keys, number_keys) for record in entry["rows"])),
        config=_floats(entry["config"]),
        not_stated=tuple(entry["not_stated"]),
        notes=tuple(entry["notes"]),
    )


@cache
def _entries() -> dict[str, Any]:
    text = resources.files("zloss_paper").joinpath("data/tables.json").read_text(encoding="utf-8")
    # Decimals keep the printed trailing zeros, and with them the rounding unit.
    entries: dict[str, Any] = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    return entries


def _line(record: Mapping[str, Any], integer_keys: tuple[str, ...], number_keys: tuple[str, ...]) -> Line:
    key: dict[str, Key] = {}
    cells: dict[str, Cell] = {}
    for column, value in record.items():
        if column in integer_keys:
            key[column] = int(value)
        elif column in number_keys:
            key[column] = float(value)
        elif isinstance(value, str):
            key[column] = value
        elif isinstance(value, Decimal):
            cells[column] = Cell.of_print(value)
    return Line(key, cells, {column: "not printed" for column, value in record.items() if value is None})


def _floats(value: Any) -> Any:
    """Settings as plain numbers."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() and "." not in str(value) else float(value)
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return value
