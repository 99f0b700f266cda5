"""Checks of claims, built from tests of single lines, of raw/centered pairs, or of two lines.

A test returns (whether it is true, a sentence with the numbers). A check holds when all its tests are true, fails when one
is false, and is open when a number it needs is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from zloss.report.text.numbers import number
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN, Check, Judgement
from zloss_paper.engine.comparison import Missing, cell, smaller
from zloss_paper.engine.table import Key, Line, Pair, Table

Tested = tuple[bool, str]
"""(whether a test is true, the sentence with its numbers)."""
Item = TypeVar("Item", Pair, Line)
PairTest = Callable[[Pair], Tested]
LineTest = Callable[[Line], Tested]
Compare = Callable[[Line, Line], Tested]
TableTest = Callable[[Table], Sequence[Tested]]

EVIDENCE = 7
"""Most sentences that are quoted as evidence: a long table is not copied into its claim."""


def judged(test: TableTest, *, none: str = "") -> Check:
    """A check from the tests of a whole table; with no test at all it is open, because of `none`."""

    def check(table: Table) -> Judgement:
        try:
            tested = test(table)
        except Missing as missing:
            return Judgement(OPEN, str(missing))
        if none and not tested:
            return Judgement(OPEN, none)
        failed = [sentence for ok, sentence in tested if not ok]
        # Two comparisons of the same numbers give the same sentence.
        shown = dict.fromkeys(failed or [sentence for _, sentence in tested])
        return Judgement(FAILS if failed else HOLDS, "; ".join(shown))

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


def all_pairs(test: PairTest) -> Check:
    """Holds when it holds for every raw/centered pair of the table."""
    return lambda table: _every(table.pairs(), test, "no raw/centered pair was measured")


def all_lines(test: LineTest, **key: str) -> Check:
    """Holds when it holds for every line with `key`."""
    none = f"no line with {key} was measured" if key else "no line was measured"
    return lambda table: _every(table.find(**key), test, none)


def some_pair(test: PairTest, *, shown_by: Sequence[str]) -> Check:
    """Holds when one pair shows it; fails when none does although all models of `shown_by` were measured."""

    def check(table: Table) -> Judgement:
        tested = list(_tested(table.pairs(), test))
        shown = [sentence for ok, sentence in tested if ok]
        if shown:
            return Judgement(HOLDS, "; ".join(shown))
        sentences = "; ".join(sentence for _, sentence in tested) or "no raw/centered pair was measured"
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
        pairs = [
            pair
            for pair in table.pairs()
            if pair.model in models and all(pair.raw.key.get(name) == value for name, value in key.items())
        ]
        absent = [model for model in models if model not in {pair.model for pair in pairs}]
        if absent:
            where = f" on {', '.join(key.values())}" if key else ""
            return Judgement(OPEN, f"not measured: {', '.join(absent)}{where}")
        deviating = [pair for pair in pairs if pair.deviations]
        if exact and deviating:
            return Judgement(
                OPEN,
                f"a number of the paper's setting, from which {deviating[0].name} deviates: {'; '.join(deviating[0].deviations)}",
            )
        return _every(pairs, test, "")

    return check


def between(column: str, low: Key, high: Key, compare: Compare) -> Check:
    """Holds when `compare(line at low, line at high)` does for every two lines that differ in `column` alone."""

    def tests(table: Table) -> list[Tested]:
        tested = []
        for first in table.find(**{column: low}):
            rest = {name: value for name, value in first.key.items() if name != column}
            tested += [compare(first, second) for second in table.find(**{**rest, column: high})]
        return tested

    return judged(tests, none=f"no two lines differ in {column} {low} and {high} alone")


def rises(column: str, symbol: str) -> Compare:
    """The number of the second line is larger."""

    def compare(first: Line, second: Line) -> Tested:
        a, b = cell(first, column), cell(second, column)
        return smaller(a, b), f"{second.name()}: {symbol} {number(a.value)} → {number(b.value)}"

    return compare


def times_smaller(column: str, symbol: str, factor: float) -> Compare:
    """The number of the second line is smaller than the first's by `factor` at least."""

    def compare(first: Line, second: Line) -> Tested:
        a, b = cell(first, column), cell(second, column)
        return b.low * factor <= a.high, f"{second.name()}: {symbol} {number(a.value)} → {number(b.value)}"

    return compare


def _every(items: Sequence[Item], test: Callable[[Item], Tested], none: str) -> Judgement:
    try:
        tested = [test(item) for item in items]
    except Missing as missing:
        return Judgement(OPEN, str(missing))
    if not tested:
        return Judgement(OPEN, none)
    failed = [sentence for ok, sentence in tested if not ok]
    return Judgement(FAILS if failed else HOLDS, _first(failed or [sentence for _, sentence in tested]))


def _first(sentences: Sequence[str]) -> str:
    rest = len(sentences) - EVIDENCE
    return "; ".join(sentences[:EVIDENCE]) + (f"; and {rest} more" if rest > 0 else "")


def _tested(pairs: Iterable[Pair], test: PairTest) -> Iterable[Tested]:
    for pair in pairs:
        try:
            yield test(pair)
        except Missing as missing:
            yield False, str(missing)
