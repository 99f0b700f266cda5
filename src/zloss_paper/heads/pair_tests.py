"""Tests of a raw/centered pair: what centering does to one number of a head."""

from __future__ import annotations

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import PairTest, Tested
from zloss_paper.engine.comparison import cell, near, ratio, smaller
from zloss_paper.engine.table import Cell, Pair

SYMBOLS = {
    "ppl": "PPL",
    "diag_z": "Diag Z",
    "p_z_999": "P_Z^99.9",
    "a_p_99": "A_p^99",
    "mu_abs_99": "p99 |μ|",
    "sigma_1": "σ_1",
}


def change(pair: Pair, column: str) -> str:
    """ "GPT-2: P_Z^99.9 263.5 → 20.61"."""
    raw, centered = cell(pair.raw, column), cell(pair.centered, column)
    return f"{pair.name}: {SYMBOLS[column]} {number(raw.value)} → {number(centered.value)}"


def rises(column: str) -> PairTest:
    """Centering raises the number."""

    def test(pair: Pair) -> Tested:
        raw, centered = cell(pair.raw, column), cell(pair.centered, column)
        return smaller(raw, centered), change(pair, column)

    return test


def falls(column: str, *, factor: float = 1.0) -> PairTest:
    """Centering lowers the number, by at least `factor`."""

    def test(pair: Pair) -> Tested:
        raw, centered = cell(pair.raw, column), cell(pair.centered, column)
        ok = smaller(centered, raw) and raw.high >= factor * centered.low
        return ok, change(pair, column)

    return test


def both(*tests: PairTest) -> PairTest:
    """Both tests; the sentence has the numbers of both."""

    def test(pair: Pair) -> Tested:
        tested = [one(pair) for one in tests]
        rest = [sentence.partition(": ")[2] for _, sentence in tested[1:]]
        return all(ok for ok, _ in tested), ", ".join([tested[0][1], *rest])

    return test


def falls_by(column: str, quoted: float, half_unit: float) -> PairTest:
    """Centering divides the number by the quoted factor."""

    def test(pair: Pair) -> Tested:
        found = ratio(cell(pair.raw, column), cell(pair.centered, column))
        sentence = f"{change(pair, column)}, a factor of {number(found.value)}"
        return near(found, Cell(quoted, half_unit)), sentence

    return test


def goes_from_to(column: str, raw: Cell, centered: Cell) -> PairTest:
    """The number has the quoted values."""

    def test(pair: Pair) -> Tested:
        ok = near(cell(pair.raw, column), raw) and near(cell(pair.centered, column), centered)
        return ok, change(pair, column)

    return test


def in_range(column: str, low: float, high: float) -> PairTest:
    """The raw number lies between two bounds, within the rounding of its cell."""

    def test(pair: Pair) -> Tested:
        found = cell(pair.raw, column)
        return found.high >= low and found.low <= high, f"{pair.name}: {column} {number(found.value)}"

    return test


def quoted(column: str, value: float, half_unit: float) -> PairTest:
    """The raw number is the quoted one."""

    def test(pair: Pair) -> Tested:
        found = cell(pair.raw, column)
        return near(found, Cell(value, half_unit)), f"{pair.name}: {column} {number(found.value)}"

    return test
