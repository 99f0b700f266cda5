"""The paper's statements about a table as checks on data.

A claim reads any table of the right columns, the paper's own or ours. Its check is built from tests of single lines, of
raw/centered pairs, or of two lines. A test returns (whether it is true, a sentence with the numbers). A check holds when all
its tests are true, fails when one is false, and is open when a number it needs is missing. Comparisons allow for the rounding
of printed cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zloss.report.numbers import number
from zloss.results.reproduction import Verdict
from zloss_paper.engine.table import Cell, Key, Line, Pair, Table

HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
OPEN: Verdict = "cannot be tested here"
QUOTED_TOLERANCE = 0.05
"""Relative distance from a number the paper quotes within which ours is the same; the paper gives none."""
SYMBOLS = {
    "ppl": "PPL",
    "diag_z": "Diag Z",
    "p_z_999": "P_Z^99.9",
    "a_p_99": "A_p^99",
    "mu_abs_99": "p99 |μ|",
    "sigma_1": "σ_1",
    "grad_norm_p99": "p99 ‖g‖",
    "grad_norm_max": "max ‖g‖",
}
"""Columns in sentences."""
EVIDENCE = 7
"""Most sentences that are quoted as evidence: a long table is not copied into its claim."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on one claim, with its evidence."""

    verdict: Verdict
    evidence: str


Check = Callable[[Table], Judgement]
Tested = tuple[bool, str]
"""(whether a test is true, the sentence with its numbers)."""
PairTest = Callable[[Pair], Tested]
LineTest = Callable[[Line], Tested]
Compare = Callable[[Line, Line], Tested]
TableTest = Callable[[Table], Sequence[Tested]]


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, in our words, with its check."""

    id: str
    statement: str
    check: Check
    reading: str = ""
    """Our part of the check: thresholds and tolerances that the paper does not give."""


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


def judged(test: TableTest, *, none: str = "", most: int | None = None) -> Check:
    """A check from the tests of a whole table; with no test at all it is open, because of `none`.

    Its evidence is the sentences of the failed tests, or of all, and at most `most` of them.
    """

    def check(table: Table) -> Judgement:
        try:
            tested = test(table)
        except Missing as missing:
            return Judgement(OPEN, str(missing))
        if none and not tested:
            return Judgement(OPEN, none)
        failed = [sentence for ok, sentence in tested if not ok]
        # Two comparisons of the same numbers give the same sentence.
        sentences = list(dict.fromkeys(failed or [sentence for _, sentence in tested]))
        rest = len(sentences[most:]) if most is not None else 0
        evidence = "; ".join(sentences[:most]) + (f"; and {rest} more" if rest else "")
        return Judgement(FAILS if failed else HOLDS, evidence)

    return check


def together(*checks: Check) -> Check:
    """Holds when all do; open where one is open and none fails."""

    def check(table: Table) -> Judgement:
        judgements = [one(table) for one in checks]
        for verdict in (FAILS, OPEN):
            found = [judgement.evidence for judgement in judgements if judgement.verdict == verdict]
            if found:
                return Judgement(verdict, "; ".join(found))
        return Judgement(HOLDS, "; ".join(judgement.evidence for judgement in judgements))

    return check


def among(select: Callable[[Line], bool], check: Check, *, none: str = "") -> Check:
    """The check on the lines that `select` picks; with no such line it is open, because of `none`."""

    def selected(table: Table) -> Judgement:
        lines = tuple(line for line in table if select(line))
        return check(Table(lines)) if lines or not none else Judgement(OPEN, none)

    return selected


def all_pairs(test: PairTest) -> Check:
    """Holds when it holds for every raw/centered pair of the table."""
    none = "no raw/centered pair was measured"
    return judged(lambda table: [test(pair) for pair in table.pairs()], none=none, most=EVIDENCE)


def all_lines(test: LineTest, **key: str) -> Check:
    """Holds when it holds for every line with `key`."""
    none = f"no line with {key} was measured" if key else "no line was measured"
    return judged(lambda table: [test(line) for line in table.find(**key)], none=none, most=EVIDENCE)


def some_pair(test: PairTest, *, shown_by: Sequence[str]) -> Check:
    """Holds when one pair shows it; fails when none does although all models of `shown_by` were measured."""

    def tested(pair: Pair) -> Tested:
        try:
            return test(pair)
        except Missing as missing:
            return False, str(missing)

    def check(table: Table) -> Judgement:
        found = [tested(pair) for pair in table.pairs()]
        shown = [sentence for ok, sentence in found if ok]
        if shown:
            return Judgement(HOLDS, "; ".join(shown))
        sentences = "; ".join(sentence for _, sentence in found) or "no raw/centered pair was measured"
        absent = [model for model in shown_by if model not in {pair.model for pair in table.pairs()}]
        if not absent:
            return Judgement(FAILS, sentences)
        return Judgement(
            OPEN, f"{sentences}; in the paper {', '.join(shown_by)} show it; not measured: {', '.join(absent)}"
        )

    return check


def for_models(models: Sequence[str], test: PairTest, *, exact: bool = False, **key: str) -> Check:
    """Holds when it holds for every pair of these models; open where one of them was not measured.

    `exact` claims quote a number of the paper's setting: they need lines without deviations from it.
    """

    def check(table: Table) -> Judgement:
        pairs = [pair for pair in Table(table.find(**key)).pairs() if pair.model in models]
        absent = [model for model in models if model not in {pair.model for pair in pairs}]
        if absent:
            where = f" on {', '.join(key.values())}" if key else ""
            return Judgement(OPEN, f"not measured: {', '.join(absent)}{where}")
        deviating = next((pair for pair in pairs if pair.deviations), None)
        if exact and deviating is not None:
            why = "; ".join(deviating.deviations)
            return Judgement(OPEN, f"a number of the paper's setting, from which {deviating.name} deviates: {why}")
        return judged(lambda _: [test(pair) for pair in pairs], most=EVIDENCE)(table)

    return check


def between(column: str, low: Key, high: Key, compare: Compare) -> Check:
    """Holds when `compare(line at low, line at high)` does for every two lines that differ in `column` alone."""

    def tests(table: Table) -> list[Tested]:
        return [
            compare(first, second)
            for first in table.find(**{column: low})
            for second in table.find(**{**first.key, column: high})
        ]

    return judged(tests, none=f"no two lines differ in {column} {low} and {high} alone")


def rises(column: str, symbol: str) -> Compare:
    """The number of the second line is larger."""
    return _change(column, symbol, smaller)


def times_smaller(column: str, symbol: str, factor: float) -> Compare:
    """The number of the second line is smaller than the first's by `factor` at least."""
    return _change(column, symbol, lambda a, b: b.low * factor <= a.high)


def line_test(
    columns: Mapping[str, str], holds: Callable[..., bool], digits: Mapping[str, int] | None = None
) -> LineTest:
    """`holds` of the cells of these columns; the sentence has each number behind its symbol."""

    def test(line: Line) -> Tested:
        found = {column: cell(line, column) for column in columns}
        shown = [
            f"{columns[column]} {number(one.value, (digits or {}).get(column, 4))}".strip()
            for column, one in found.items()
        ]
        return holds(*found.values()), f"{line.name()}: {', '.join(shown)}"

    return test


def _change(column: str, symbol: str, holds: Callable[[Cell, Cell], bool]) -> Compare:
    def compare(first: Line, second: Line) -> Tested:
        a, b = cell(first, column), cell(second, column)
        return holds(a, b), f"{second.name()}: {symbol} {number(a.value)} → {number(b.value)}"

    return compare
