"""The paper's statements about a table as checks on data.

A claim reads any table of the right columns, the paper's own or ours, and answers with a verdict and the numbers it
rests on. Which thresholds are ours is said in `reading`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from zloss.report.text.numbers import number
from zloss_paper.engine.table import Cell, Pair, Row, Table

Verdict = Literal["holds", "does not hold", "cannot be tested here"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
OPEN: Verdict = "cannot be tested here"

QUOTED_TOLERANCE = 0.05
"""Relative distance from a number the paper quotes within which ours is the same; the paper gives none."""

EVIDENCE = 7
"""Rows whose numbers are quoted as evidence."""


@dataclass(frozen=True)
class Finding:
    """A verdict, and why."""

    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, in our words, with its check."""

    id: str
    statement: str
    check: Callable[[Table], Finding]
    reading: str = ""
    """What of the check is ours: thresholds and tolerances the paper does not give."""


class Missing(Exception):
    """A cell that a claim needs does not exist; the message says which and why."""


def cell(row: Row, column: str) -> Cell:
    """The number, or `Missing`."""
    if column not in row.cells:
        raise Missing(f"{row.name()} has no {column} ({row.reasons.get(column, 'not in this table')})")
    return row.cells[column]


def smaller(a: Cell, b: Cell) -> bool:
    """a < b, given the benefit of rounding."""
    return a.low < b.high and a.value != b.value


def ratio(a: Cell, b: Cell) -> Cell:
    """a / b with the largest error that rounding allows, for positive numbers."""
    value = a.value / b.value
    spread = a.high / b.low - value if b.low > 0 else float("inf")
    return Cell(value, spread)


def near(a: Cell, quoted: Cell, tolerance: float = QUOTED_TOLERANCE) -> bool:
    """Whether a number agrees with a quoted one within tolerance and both roundings."""
    return abs(a.value - quoted.value) <= tolerance * abs(quoted.value) + a.half_unit + quoted.half_unit


Item = TypeVar("Item", Pair, Row)
PairTest = Callable[[Pair], tuple[bool, str]]
RowTest = Callable[[Row], tuple[bool, str]]


def all_pairs(test: PairTest) -> Callable[[Table], Finding]:
    """Holds when it holds for every raw/centered pair there is."""

    def check(table: Table) -> Finding:
        return _every(table.pairs(), test, "no raw/centered pair was measured")

    return check


def all_rows(test: RowTest, **key: str) -> Callable[[Table], Finding]:
    """Holds when it holds for every row with `key`."""

    def check(table: Table) -> Finding:
        return _every(table.find(**key), test, f"no row with {key} was measured" if key else "no row was measured")

    return check


def some_pair(test: PairTest, *, shown_by: Sequence[str]) -> Callable[[Table], Finding]:
    """Holds when one pair shows it. No example proves nothing, unless the models that show it in the paper are among them."""

    def check(table: Table) -> Finding:
        outcomes = list(_outcomes(table.pairs(), test))
        shown = [sentence for ok, sentence in outcomes if ok]
        if shown:
            return Finding(HOLDS, "; ".join(shown))
        sentences = "; ".join(sentence for _, sentence in outcomes) or "no raw/centered pair was measured"
        absent = [model for model in shown_by if model not in {pair.model for pair in table.pairs()}]
        if not absent:
            return Finding(FAILS, sentences)
        return Finding(
            OPEN, f"{sentences}; in the paper {', '.join(shown_by)} show it; not measured: {', '.join(absent)}"
        )

    return check


def for_models(models: Sequence[str], test: PairTest, *, exact: bool = False, **key: str) -> Callable[[Table], Finding]:
    """Holds when it holds for every pair of these models; open where one of them was not measured.

    `exact` claims quote a number of the paper's setting: they need rows without deviations from it.
    """

    def check(table: Table) -> Finding:
        pairs = [
            pair
            for pair in table.pairs()
            if pair.model in models and all(pair.raw.key.get(name) == value for name, value in key.items())
        ]
        absent = [model for model in models if model not in {pair.model for pair in pairs}]
        if absent:
            where = f" on {', '.join(key.values())}" if key else ""
            return Finding(OPEN, f"not measured: {', '.join(absent)}{where}")
        deviating = [pair for pair in pairs if pair.deviations]
        if exact and deviating:
            return Finding(
                OPEN,
                f"a number of the paper's setting, from which {deviating[0].name} deviates: {'; '.join(deviating[0].deviations)}",
            )
        return _every(pairs, test, "")

    return check


def _every(items: Sequence[Item], test: Callable[[Item], tuple[bool, str]], none: str) -> Finding:
    try:
        outcomes = [test(item) for item in items]
    except Missing as missing:
        return Finding(OPEN, str(missing))
    if not outcomes:
        return Finding(OPEN, none)
    failed = [sentence for ok, sentence in outcomes if not ok]
    if failed:
        return Finding(FAILS, _some(failed))
    return Finding(HOLDS, _some([sentence for _, sentence in outcomes]))


def _some(sentences: Sequence[str]) -> str:
    """The first few; a table of many rows needs no second copy of itself."""
    rest = len(sentences) - EVIDENCE
    return "; ".join(sentences[:EVIDENCE]) + (f"; and {rest} more" if rest > 0 else "")


def _outcomes(pairs: Iterable[Pair], test: PairTest) -> Iterable[tuple[bool, str]]:
    for pair in pairs:
        try:
            yield test(pair)
        except Missing as missing:
            yield False, str(missing)


def change(pair: Pair, column: str, symbol: str) -> str:
    """ "GPT-2: P_Z^99.9 263.5 → 20.61"."""
    raw, centered = cell(pair.raw, column), cell(pair.centered, column)
    return f"{pair.name}: {symbol} {number(raw.value)} → {number(centered.value)}"
