"""The paper's statements about a table as checks on data.

A claim reads any table with the right columns, the paper's or ours. Its check yields tests: (whether it is true, a sentence
with the numbers). A claim holds when all its tests are true, fails when one is false, and is open when a number it needs is
missing. Comparisons allow for the rounding of printed cells.

A check is built from two parts: what is read (every line, every raw/centered pair, two lines that differ in one column) and
a test of one line or a comparison of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zloss.report.numbers import number
from zloss.results.reproduction import Verdict
from zloss_paper.engine.table import Cell, Key, Line, Table

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
    "delta_src": "Δ_src",
    "delta_z": "Δ_Z",
    "grad_rel_error": "gradient error",
}
"""Columns in sentences."""
EVERYTHING = 1000
"""`Claim.most` of a claim whose evidence is never shortened."""

Tested = tuple[bool, str]
"""(whether a test is true, the sentence with its numbers)."""
Check = Callable[[Table], Iterable[Tested]]
LineTest = Callable[[Line], Tested]
Compare = Callable[[str, Line, Line], Tested]
"""A comparison of two lines; the name is how its sentence calls them."""


class Missing(Exception):
    """A claim needs something that was not measured; the message says what."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on one claim, with its evidence."""

    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, in our words, with its check."""

    id: str
    statement: str
    check: Check
    reading: str = ""
    """Our part of the check: thresholds and tolerances that the paper does not give."""
    most: int = 7
    """Maximum number of sentences quoted as evidence: a long table is not copied into its claim."""

    def judge(self, table: Table) -> Judgement:
        """Evaluate the claim; its evidence is the sentences of the failed tests, or of all."""
        try:
            tested = list(self.check(table))
        except Missing as missing:
            return Judgement(OPEN, str(missing))
        if not tested:
            return Judgement(OPEN, "nothing was measured")
        failed = [sentence for ok, sentence in tested if not ok]
        # Two comparisons of the same numbers give the same sentence.
        sentences = list(dict.fromkeys(failed or [sentence for _, sentence in tested]))
        rest = len(sentences) - self.most
        evidence = "; ".join(sentences[: self.most]) + (f"; and {rest} more" if rest > 0 else "")
        return Judgement(FAILS if failed else HOLDS, evidence)


# Cells.


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


def within(share: Cell, tolerance: float) -> bool:
    """Whether a ratio may be within a tolerance of 1."""
    return share.low <= 1 + tolerance and share.high >= 1 - tolerance


# Tests of one line, comparisons of two.


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


def change(column: str, holds: Callable[[Cell, Cell], bool]) -> Compare:
    """`holds` of the numbers of both lines: "GPT-2: P_Z^99.9 263.5 → 20.61"."""

    def compare(name: str, first: Line, second: Line) -> Tested:
        a, b = cell(first, column), cell(second, column)
        return holds(a, b), f"{name}: {SYMBOLS.get(column, column)} {number(a.value)} → {number(b.value)}"

    return compare


def rises(column: str, factor: float = 1.0) -> Compare:
    """The number of the second line is larger, by `factor` at least."""
    return change(column, lambda a, b: smaller(a, b) and b.high >= factor * a.low)


def falls(column: str, factor: float = 1.0) -> Compare:
    """The number of the second line is smaller, by `factor` at least."""
    return change(column, lambda a, b: smaller(b, a) and a.high >= factor * b.low)


# What is read.


def all_lines(test: LineTest, **key: Key) -> Check:
    """The test of every line with `key`."""

    def tests(table: Table) -> list[Tested]:
        lines = table.find(**key)
        if not lines:
            raise Missing(f"no line with {key} was measured" if key else "no line was measured")
        return [test(line) for line in lines]

    return tests


def between(column: str, low: Key, high: Key, compare: Compare) -> Check:
    """The comparison of every two lines that differ in `column` alone."""

    def tests(table: Table) -> list[Tested]:
        pairs = table.pairs(column, low, high)
        if not pairs:
            raise Missing(f"no two lines differ in {column} {low} and {high} alone")
        return [compare(second.name(), first, second) for first, second in pairs]

    return tests


def all_pairs(compare: Compare) -> Check:
    """The comparison of the raw and the centered line of every model."""

    def tests(table: Table) -> list[Tested]:
        pairs = table.pairs("head", "raw", "centered")
        return [compare(raw.name(without="head"), raw, centered) for raw, centered in pairs]

    return tests


def some_pair(compare: Compare, *, shown_by: Sequence[str]) -> Check:
    """Holds when one raw/centered pair shows it; fails when none does although all models of `shown_by` were measured."""

    def tested(raw: Line, centered: Line) -> Tested:
        try:
            return compare(raw.name(without="head"), raw, centered)
        except Missing as missing:
            return False, str(missing)

    def tests(table: Table) -> list[Tested]:
        found = [tested(*pair) for pair in table.pairs("head", "raw", "centered")]
        shown = [one for one in found if one[0]]
        absent = [model for model in shown_by if not table.find(model=model)]
        if absent and not shown:
            seen = "; ".join(sentence for _, sentence in found) or "no raw/centered pair was measured"
            raise Missing(f"{seen}; in the paper {', '.join(shown_by)} show it; not measured: {', '.join(absent)}")
        return shown or found

    return tests


def among(select: Callable[[Line], bool], check: Check, *, none: str = "no such line was measured") -> Check:
    """The check on the lines that `select` picks; with no such line it is open, because of `none`."""

    def tests(table: Table) -> Iterable[Tested]:
        lines = tuple(line for line in table if select(line))
        if not lines:
            raise Missing(none)
        return check(Table(lines))

    return tests


def of_models(models: Sequence[str], check: Check, *, exact: bool = False, **key: Key) -> Check:
    """The check on the lines of these models; open where one of them was not measured.

    `exact` claims quote a number of the paper's setting: they need lines without deviations from it.
    """

    def tests(table: Table) -> Iterable[Tested]:
        lines = tuple(line for line in table.find(**key) if line.key["model"] in models)
        absent = [model for model in models if not Table(lines).find(model=model)]
        if absent:
            where = f" on {', '.join(map(str, key.values()))}" if key else ""
            raise Missing(f"not measured: {', '.join(absent)}{where}")
        deviating = next((line for line in lines if line.deviations), None)
        if exact and deviating is not None:
            why, name = "; ".join(deviating.deviations), deviating.name(without="head")
            raise Missing(f"a number of the paper's setting, from which {name} deviates: {why}")
        return check(Table(lines))

    return tests


def together(*checks: Check) -> Check:
    """The tests of all these checks; open where one of them is open and no test fails."""

    def tests(table: Table) -> list[Tested]:
        tested: list[Tested] = []
        missing: list[str] = []
        for check in checks:
            try:
                tested += check(table)
            except Missing as error:
                missing.append(str(error))
        if missing and all(ok for ok, _ in tested):
            raise Missing("; ".join(missing))
        return tested

    return tests
