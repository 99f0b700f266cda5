"""The verdict on the PPL of a compared method."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.decide.thresholds import Thresholds
from zloss.results.comparison import Comparison, QualityVerdict


@dataclass(frozen=True)
class QualityJudgement:
    """One method under the tolerance that applies to it."""

    verdict: QualityVerdict
    """What the comparison says."""
    tolerance: float | None
    """How much PPL may rise; None where neither the comparison nor the baseline's PPL gives it."""
    accepted: bool
    """The comparison's own verdict where it states one, else whether PPL stays within the tolerance."""


@dataclass(frozen=True)
class JudgedComparison:
    """A comparison with the judgement on each of its methods."""

    comparison: Comparison
    quality: tuple[QualityJudgement, ...]


def judge_quality(comparison: Comparison, thresholds: Thresholds) -> JudgedComparison:
    """Judge every method; a tolerance that the comparison states replaces `quality_tolerance`."""
    baseline = comparison.baseline_method
    base_ppl = None if baseline is None else baseline.mean("ppl")
    tolerance = comparison.quality.tolerance_ppl
    if tolerance is None and base_ppl is not None:
        tolerance = thresholds.quality_tolerance * base_ppl
    return JudgedComparison(
        comparison,
        tuple(
            QualityJudgement(verdict, tolerance, _accepted(verdict, tolerance))
            for verdict in comparison.quality.methods
        ),
    )


def _accepted(verdict: QualityVerdict, tolerance: float | None) -> bool:
    """The comparison's verdict also weighs the diagnosed quantity, so it goes before the PPL alone."""
    if verdict.accepted is not None:
        return verdict.accepted
    return verdict.delta_ppl is not None and tolerance is not None and verdict.delta_ppl <= tolerance
