"""The verdicts of a comparison, as pages and the decision map read them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zloss.decide.thresholds import Thresholds
from zloss.decide.verdicts.from_file import judged_from_file, with_optimizer
from zloss.results.comparison import Comparison
from zloss.results.quality import QualityVerdict


@dataclass(frozen=True)
class QualityJudgement:
    """One method under the tolerance that applies to it."""

    verdict: QualityVerdict
    """What the comparison says; of a file without parts, what follows from it."""
    tolerance: float | None
    """How much PPL may rise; None where neither the comparison nor the baseline's PPL gives it."""
    accepted: bool
    """Whether quality is acceptable: the quality part where it holds or fails, else the verdict that the file states,
    else whether the mean PPL stays within the tolerance."""


@dataclass(frozen=True)
class JudgedComparison:
    """A comparison with the judgement on each of its methods."""

    comparison: Comparison
    quality: tuple[QualityJudgement, ...]


def judge_comparison(
    comparison: Comparison, thresholds: Thresholds, *, stated_thresholds: bool = False
) -> JudgedComparison:
    """Judge every method; a tolerance that the comparison states replaces `quality_tolerance`.

    Parts that the comparison holds are kept; with `stated_thresholds` its optimizer parts are judged anew.
    """
    baseline = comparison.baseline_method
    base_ppl = None if baseline is None else baseline.mean("ppl")
    tolerance = comparison.quality.tolerance_ppl
    if tolerance is None and base_ppl is not None:
        tolerance = thresholds.quality_tolerance * base_ppl
    judged = []
    for stated in comparison.quality.methods:
        verdict = stated
        if stated.reasons is None:
            verdict = judged_from_file(comparison, stated, tolerance, thresholds)
        elif stated_thresholds:
            verdict = with_optimizer(comparison, stated, thresholds)
        judged.append(QualityJudgement(verdict, tolerance, _acceptable(stated, verdict, tolerance)))
    quality = replace(comparison.quality, methods=tuple(item.verdict for item in judged))
    return JudgedComparison(replace(comparison, quality=quality), tuple(judged))


def _acceptable(stated: QualityVerdict, verdict: QualityVerdict, tolerance: float | None) -> bool:
    part = None if verdict.parts is None else verdict.parts.quality
    if part is not None and part.state != "open":
        return part.state == "holds"
    if stated.reasons is None and stated.accepted is not None:
        return stated.accepted
    return stated.delta_ppl is not None and tolerance is not None and stated.delta_ppl <= tolerance
