"""A reproduction as lines of text, for the terminal and for the page: ours, the paper's beside it, and the ratio."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.text.numbers import MISSING, factor, number
from zloss.results.quantities import symbol
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN
from zloss_paper.engine.reproduction import NOT_JUDGED, Reproduction, ratio_of
from zloss_paper.engine.table import Cell, Line


@dataclass(frozen=True)
class PrintedLine:
    """One printed line; `style` says what it is."""

    cells: tuple[str, ...]
    style: str
    """ "ours", "paper" or "ratio"."""


def header(result: Reproduction) -> tuple[str, ...]:
    """Key columns, a column that says ours or paper, then the numbers."""
    numbers = tuple(symbol(column) for column in result.recipe.columns)
    return (*_keys(result), *(("",) if numbers else ()), *numbers)


def printed_lines(result: Reproduction) -> list[PrintedLine]:
    """Ours, then the paper's line beside it and the ratio where there is one."""
    out: list[PrintedLine] = []
    for line in result.table:
        keys = tuple(str(line.key.get(column, "")) for column in _keys(result))
        if not result.recipe.columns:
            out.append(PrintedLine(keys, "ours"))
            continue
        out.append(PrintedLine((*keys, "ours", *(_cell(line.cells.get(c)) for c in result.recipe.columns)), "ours"))
        other = result.beside(line)
        if other is None:
            continue
        blank = ("",) * len(keys)
        name = _beside_name(line, other)
        out.append(PrintedLine((*blank, name, *(_cell(other.cells.get(c)) for c in result.recipe.columns)), "paper"))
        ratios = (ratio_of(line.cells.get(c), other.cells.get(c)) for c in result.recipe.columns)
        out.append(PrintedLine((*blank, "ours / paper", *(factor(r) for r in ratios)), "ratio"))
    return out


def tally(result: Reproduction) -> str:
    """ "3 hold, 0 do not hold, 8 cannot be tested here"; at the smoke profile that they are not judged."""
    if not result.judged:
        return f"{len(result.claims)} claims, {NOT_JUDGED}"
    return f"{result.count(HOLDS)} hold, {result.count(FAILS)} do not hold, {result.count(OPEN)} cannot be tested here"


def missing(result: Reproduction) -> list[str]:
    """Why numbers of ours do not exist, one sentence per line and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in result.table:
        for column, why in line.reasons.items():
            found.setdefault((line.name(), why), []).append(symbol(column))
    return [f"{name}: no {', '.join(columns)}: {why}" for (name, why), columns in found.items()]


def deviations(result: Reproduction) -> list[str]:
    """In what our lines differ from the paper's setting, each once."""
    found: dict[str, list[str]] = {}
    for line in result.table:
        for deviation in line.deviations:
            found.setdefault(deviation, []).append(str(line.key.get("model", "")))
    every = len({str(line.key.get("model", "")) for line in result.table})
    return [
        why if len(set(models)) == every else f"{', '.join(dict.fromkeys(models))}: {why}"
        for why, models in found.items()
    ]


def _keys(result: Reproduction) -> tuple[str, ...]:
    return tuple(result.table.lines[0].key) if result.table.lines else ()


def _beside_name(line: Line, other: Line) -> str:
    """The paper's line by what differs from ours."""
    differing = [str(value) for column, value in other.key.items() if line.key.get(column, value) != value]
    return f"paper, {', '.join(differing)}" if differing else "paper"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return MISSING
    # As printed, zeros included, unless it is a power of ten.
    return cell.printed if cell.printed and abs(cell.value) >= 1e-4 else number(cell.value)
