"""The paper's statements about a table as checks on data.

A claim reads any table of the right columns, the paper's own or ours. Its check returns a verdict and the numbers behind
it. `reading` says which thresholds are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zloss.results.reproduction import Verdict as Verdict
from zloss_paper.engine.table import Table

HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
OPEN: Verdict = "cannot be tested here"


@dataclass(frozen=True)
class Judgement:
    """The verdict on one claim, with its evidence."""

    verdict: Verdict
    evidence: str


Check = Callable[[Table], Judgement]


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, in our words, with its check."""

    id: str
    statement: str
    check: Check
    reading: str = ""
    """What of the check is ours: thresholds and tolerances the paper does not give."""
