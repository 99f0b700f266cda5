"""What the page shows of a recommendation."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.tables.plain import flat_lines
from zloss.report.tables.recommendation import ARM_TITLES, ArmLine, arm_lines, confirmation_lines, seeds_sentence
from zloss.report.tables.verdicts import tally
from zloss.report.text.numbers import seconds
from zloss.results.recommendation import Recommendation
from zloss.results.record import to_plain


@dataclass(frozen=True)
class RecommendationView:
    """One recommendation with its tables."""

    found: Recommendation
    tally: str
    seeds: str
    titles: tuple[str, ...]
    arms: list[ArmLine]
    confirmation: list[tuple[str, str, list[tuple[str, str, str]]]]
    provenance: list[tuple[str, str]]


def recommendation_view(found: Recommendation) -> RecommendationView:
    """The view of one record."""
    budget = "none" if found.budget_seconds is None else seconds(found.budget_seconds)
    times = [("budget", budget), ("time spent", seconds(found.seconds))]
    return RecommendationView(
        found=found,
        tally=tally(found.stages),
        seeds=seeds_sentence(found),
        titles=ARM_TITLES,
        arms=arm_lines(found),
        confirmation=confirmation_lines(found),
        provenance=[*times, *flat_lines(to_plain(found.provenance))],
    )
