"""Tests of matched methods: the line of a method against the CE line of its table."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import Compare, LineTest, Tested, judged
from zloss_paper.engine.claim import Check
from zloss_paper.engine.comparison import Missing, cell, ratio, smaller
from zloss_paper.engine.paper_methods import CE
from zloss_paper.engine.table import Cell, Key, Line, Table

NEAR_CE = 0.1
"""Relative difference within which a tail, gain or gradient norm is at the CE level; the paper gives none."""
LEAST_CHANGE = 0.01
"""Smallest relative change of a tail, gain or gradient norm that counts as a change; every difference of PPL counts."""
COUNTS = f"a change counts from {LEAST_CHANGE:.0%} on"
SMALL_PPL = 0.005
"""Relative difference of PPL that counts as small."""
SAME_PPL = 0.001
"""Relative difference of PPL that counts as unchanged."""
PZ, AP, GRAD, MAX = "P_Z^99.9", "A_p^99", "p99 ‖g‖", "max ‖g‖"
SYMBOLS = {"p_z_999": PZ, "a_p_99": AP, "grad_norm_p99": GRAD, "grad_norm_max": MAX, "ppl": "PPL", "diag_z": "Diag Z"}


def line_of(table: Table, method: str, **key: Key) -> Line:
    """The line of a method, or `Missing`."""
    found = table.find(method=method, **key)
    if not found:
        raise Missing(f"{method} was not measured")
    return found[0]


def against_ce(methods: Sequence[str], *compares: Compare, **key: Key) -> Check:
    """Holds when every comparison of CE with every one of these methods does."""

    def tests(table: Table) -> list[Tested]:
        ce = line_of(table, CE)
        return [compare(ce, line_of(table, method, **key)) for method in methods for compare in compares]

    return judged(tests)


def _change(first: Line, second: Line, column: str) -> tuple[Cell, Cell, str]:
    a, b = cell(first, column), cell(second, column)
    text = f"{second.key['method']}: {SYMBOLS.get(column, column)} {number(a.value)} → {number(b.value)}"
    return a, b, text


def falls(a: Cell, b: Cell, column: str) -> bool:
    """Whether b may be smaller than a, within the rounding of both, by at least what counts in this column."""
    return smaller(b, a) and b.low <= a.high * (1 - _least(column))


def _least(column: str) -> float:
    return 0.0 if column == "ppl" else LEAST_CHANGE


def lower(column: str) -> Compare:
    """The second line's number is smaller."""

    def compare(first: Line, second: Line) -> Tested:
        a, b, text = _change(first, second, column)
        return falls(a, b, column), text

    return compare


def higher(column: str, factor: float = 1.0) -> Compare:
    """The second line's number is larger, by `factor` at least."""

    def compare(first: Line, second: Line) -> Tested:
        a, b, text = _change(first, second, column)
        return smaller(a, b) and b.high >= a.low * max(factor, 1 + _least(column)), text

    return compare


def near_ce(column: str, tolerance: float = NEAR_CE) -> Compare:
    """The second line's number is within a relative tolerance of the first's."""

    def compare(first: Line, second: Line) -> Tested:
        a, b, text = _change(first, second, column)
        share = ratio(b, a)
        return share.low <= 1 + tolerance and share.high >= 1 - tolerance, text

    return compare


def zero(*columns: str) -> LineTest:
    """These fractions of a line are 0."""

    def test(line: Line) -> Tested:
        found = {column: cell(line, column).value for column in columns}
        shown = ", ".join(f"{column} {number(value)}" for column, value in found.items())
        return not any(found.values()), f"{line.name()}: {shown}"

    return test


def all_smallest(column: str, method: str) -> Check:
    """No other line has a smaller number than that of `method`."""
    symbol = SYMBOLS.get(column, column)

    def tests(table: Table) -> list[Tested]:
        own = cell(line_of(table, method), column)
        found = [(line.name(), cell(line, column)) for line in table]
        return [(not falls(own, other, column), f"{name}: {symbol} {number(other.value)}") for name, other in found]

    return judged(tests)
