"""A reproduction as lines of text, for the terminal and for the page: ours, the paper's beside it, and the ratio."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.formatting import MISSING, factor, number
from zloss.results.quantities import symbol
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN
from zloss_paper.engine.reproduction import Reproduction, ratio_of
from zloss_paper.engine.table import Cell, Row

NOT_COMPARABLE = (
    "The numbers are not comparable with the paper's (see the deviations); its claims may still be tested on ours."
)


@dataclass(frozen=True)
class Line:
    """One printed line; `style` says what it is."""

    cells: tuple[str, ...]
    style: str
    """ "ours", "paper" or "ratio"."""


def header(result: Reproduction) -> tuple[str, ...]:
    """Key columns, whose line it is, then the numbers."""
    numbers = tuple(symbol(column) for column in result.recipe.columns)
    return (*_keys(result), *(("",) if numbers else ()), *numbers)


def lines(result: Reproduction) -> list[Line]:
    """Ours, then the paper's row beside it and the ratio where there is one."""
    out: list[Line] = []
    for row in result.table:
        keys = tuple(str(row.key.get(column, "")) for column in _keys(result))
        if not result.recipe.columns:
            out.append(Line(keys, "ours"))
            continue
        out.append(Line((*keys, "ours", *(_cell(row.cells.get(c)) for c in result.recipe.columns)), "ours"))
        other = result.beside(row)
        if other is None:
            continue
        blank = ("",) * len(keys)
        name = _beside_name(row, other)
        out.append(Line((*blank, name, *(_cell(other.cells.get(c)) for c in result.recipe.columns)), "paper"))
        ratios = (ratio_of(row.cells.get(c), other.cells.get(c)) for c in result.recipe.columns)
        out.append(Line((*blank, "ours / paper", *(factor(r) for r in ratios)), "ratio"))
    return out


def tally(result: Reproduction) -> str:
    """ "3 hold, 0 do not hold, 8 cannot be tested here"."""
    return f"{result.count(HOLDS)} hold, {result.count(FAILS)} do not hold, {result.count(OPEN)} cannot be tested here"


def missing(result: Reproduction) -> list[str]:
    """Why numbers of ours do not exist, one sentence per row and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in result.table:
        for column, why in row.reasons.items():
            found.setdefault((row.name(), why), []).append(symbol(column))
    return [f"{name}: no {', '.join(columns)}: {why}" for (name, why), columns in found.items()]


def deviations(result: Reproduction) -> list[str]:
    """In what our rows differ from the paper's setting, each once."""
    found: dict[str, list[str]] = {}
    for row in result.table:
        for deviation in row.deviations:
            found.setdefault(deviation, []).append(str(row.key.get("model", "")))
    every = len({str(row.key.get("model", "")) for row in result.table})
    return [
        why if len(set(models)) == every else f"{', '.join(dict.fromkeys(models))}: {why}"
        for why, models in found.items()
    ]


def _keys(result: Reproduction) -> tuple[str, ...]:
    return tuple(result.table.rows[0].key) if result.table.rows else ()


def _beside_name(row: Row, other: Row) -> str:
    """The paper's row by what differs from ours."""
    differing = [str(value) for column, value in other.key.items() if row.key.get(column, value) != value]
    return f"paper, {', '.join(differing)}" if differing else "paper"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return MISSING
    # As printed, zeros included, unless it is a power of ten.
    return cell.printed if cell.printed and abs(cell.value) >= 1e-4 else number(cell.value)
