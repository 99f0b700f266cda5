"""Claims about rows that differ in one column of their key: storage, logit multiplier, method."""

from __future__ import annotations

from collections.abc import Callable

from zloss.report.text.numbers import number
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN, Finding, Missing, cell, smaller
from zloss_paper.engine.table import Key, Row, Table

Check = Callable[[Table], Finding]
Compare = Callable[[Row, Row], tuple[bool, str]]


def between(column: str, low: Key, high: Key, compare: Compare) -> Check:
    """Holds when `compare(row at low, row at high)` does for every two rows that agree in everything but `column`."""

    def check(table: Table) -> Finding:
        outcomes = []
        for first in table.find(**{column: low}):
            rest = {name: value for name, value in first.key.items() if name != column}
            for second in table.find(**{**rest, column: high}):
                try:
                    outcomes.append(compare(first, second))
                except Missing as missing:
                    return Finding(OPEN, str(missing))
        if not outcomes:
            return Finding(OPEN, f"no two rows differ in {column} {low} and {high} alone")
        failed = [sentence for ok, sentence in outcomes if not ok]
        return Finding(FAILS, "; ".join(failed)) if failed else Finding(HOLDS, "; ".join(s for _, s in outcomes))

    return check


def rises(column: str, symbol: str) -> Compare:
    """The number of the second row is larger."""

    def compare(first: Row, second: Row) -> tuple[bool, str]:
        a, b = cell(first, column), cell(second, column)
        return smaller(a, b), f"{second.name()}: {symbol} {number(a.value)} → {number(b.value)}"

    return compare


def times_smaller(column: str, symbol: str, factor: float) -> Compare:
    """The number of the second row is smaller than the first's by `factor` at least."""

    def compare(first: Row, second: Row) -> tuple[bool, str]:
        a, b = cell(first, column), cell(second, column)
        return b.low * factor <= a.high, f"{second.name()}: {symbol} {number(a.value)} → {number(b.value)}"

    return compare
