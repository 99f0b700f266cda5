"""Decisions in words: the verdict of a stage, the counts of a map, the numbers of an effect."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.text.numbers import coefficient, number
from zloss.results.decision import Decision, Effect

WORDS = {"fired": "fired", "quiet": "quiet", "open": "not evaluated"}
"""The verdict as it is printed, by its status."""


def status(decision: Decision) -> str:
    """ "fired", "quiet" or "open", which is also the CSS class."""
    return {True: "fired", False: "quiet", None: "open"}[decision.fired]


def tally(decisions: Sequence[Decision]) -> str:
    """Counts of verdicts: "4 of 8 stages fired, 0 quiet, 4 not evaluated"."""
    found = [status(decision) for decision in decisions]
    fired, quiet, unevaluated = (found.count(name) for name in ("fired", "quiet", "open"))
    return f"{fired} of {len(found)} stages fired, {quiet} quiet, {unevaluated} not evaluated"


def effect_number(effect: Effect, value: float | None) -> str:
    """A number of an effect; a λ is written as a power of ten."""
    return coefficient(value) if effect.unit == "λ" else number(value)
