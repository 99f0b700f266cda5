"""Comparisons of two numbers of a table, each within the rounding of its printed cell."""

from __future__ import annotations

from zloss_paper.engine.table import Cell, Line

QUOTED_TOLERANCE = 0.05
"""Relative distance from a number the paper quotes within which ours is the same; the paper gives none."""


class Missing(Exception):
    """A cell that a claim needs does not exist; the message names the cell and the reason."""


def cell(line: Line, column: str) -> Cell:
    """The number, or `Missing`."""
    if column not in line.cells:
        raise Missing(f"{line.name()} has no {column} ({line.reasons.get(column, 'not in this table')})")
    return line.cells[column]


def smaller(a: Cell, b: Cell) -> bool:
    """Whether a < b is possible within the rounding of both."""
    return a.low < b.high and a.value != b.value


def ratio(a: Cell, b: Cell) -> Cell:
    """a / b with the largest error that rounding allows, for positive numbers."""
    value = a.value / b.value
    spread = a.high / b.low - value if b.low > 0 else float("inf")
    return Cell(value, spread)


def near(a: Cell, quoted: Cell, tolerance: float = QUOTED_TOLERANCE) -> bool:
    """Whether a number agrees with a quoted one within tolerance and both roundings."""
    return abs(a.value - quoted.value) <= tolerance * abs(quoted.value) + a.half_unit + quoted.half_unit
