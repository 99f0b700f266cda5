"""The verdict on a method of a comparison that states no parts: an older file, or one written by hand.

Such a file has no per-block validation, so quality and coordinate can fail or stay open, and never hold.
"""

from __future__ import annotations

from dataclasses import replace

from zloss.decide.thresholds import Thresholds
from zloss.decide.verdicts.optimizer import judge_optimizer
from zloss.decide.verdicts.quality import RUN_AGAIN, judge_quality_by_seed
from zloss.decide.verdicts.router_scale import judge_scale
from zloss.decide.verdicts.verdict import with_verdict
from zloss.results.comparison import ComparedMethod, Comparison
from zloss.results.quality import QualityVerdict
from zloss.results.verdict import VerdictPart, VerdictParts

CENTERED_HEAD = "centered-head"
NOTHING_TO_LOWER = ("ce", "none")
"""Names of CE and of the absent router loss."""


def judged_from_file(
    comparison: Comparison, stated: QualityVerdict, tolerance_ppl: float | None, thresholds: Thresholds
) -> QualityVerdict:
    """`stated` with verdict, reasons and parts from what the file holds; unchanged where its method is not in the file."""
    method = next((m for m in comparison.methods if (m.method, m.coef) == (stated.method, stated.coef)), None)
    base = comparison.baseline_method
    if method is None or base is None or method is base:
        return stated
    parts = VerdictParts(
        coordinate=_coordinate(comparison, method, stated, thresholds),
        quality=_quality(base, method, tolerance_ppl),
        optimizer=judge_optimizer(comparison, method, thresholds),
    )
    if parts.coordinate is None:
        return replace(stated, accepted=None, parts=parts, reasons=())
    return with_verdict(stated, parts)


def with_optimizer(comparison: Comparison, stated: QualityVerdict, thresholds: Thresholds) -> QualityVerdict:
    """`stated` with its optimizer part under other thresholds."""
    method = next((m for m in comparison.methods if (m.method, m.coef) == (stated.method, stated.coef)), None)
    if method is None or stated.parts is None:
        return stated
    parts = replace(stated.parts, optimizer=judge_optimizer(comparison, method, thresholds))
    if stated.verdict is None:
        return replace(stated, parts=parts)
    return with_verdict(stated, parts)


def _quality(base: ComparedMethod, method: ComparedMethod, tolerance_ppl: float | None) -> VerdictPart:
    ppl = base.mean("ppl")
    if ppl is None or ppl <= 0 or tolerance_ppl is None:
        return VerdictPart("open", "the file holds no PPL of the baseline.")
    found = None if method.paired is None else method.paired.deployed.get("ce")
    if found is None:
        return VerdictPart("open", f"the file holds no CE by seed; {RUN_AGAIN}.")
    return judge_quality_by_seed(found.by_seed, baseline_ppl=ppl, tolerance_ppl=tolerance_ppl)


def _coordinate(
    comparison: Comparison, method: ComparedMethod, stated: QualityVerdict, thresholds: Thresholds
) -> VerdictPart | None:
    if method.method.split(" + ")[0] in NOTHING_TO_LOWER:
        return None
    if comparison.router is not None:
        variants = (v for v in comparison.router.conventions if (v.convention, v.coef) == (method.method, method.coef))
        variant = next(variants, None)
        scale = None if variant is None else variant.s_rel
        return judge_scale(scale, method.coef, thresholds.router_scale_tolerance)
    if method.method == CENTERED_HEAD:
        return _shift(comparison, method)
    key = comparison.quality.diagnosed
    side = None if method.paired is None else method.paired.same_coordinate.of(stated.coordinate)
    found = None if side is None else side.get(key)
    ratio = None if found is None else found.ratio
    shown = "" if ratio is None else f"{key} × {ratio:.4g} without an interval; "
    return VerdictPart("open", f"{shown}{RUN_AGAIN}.", {"quantity": key, "ratio": ratio})


def _shift(comparison: Comparison, method: ComparedMethod) -> VerdictPart:
    """p99 |μ| of the centered head against the baseline's, each in the coordinate that it deploys."""
    base, key = comparison.baseline_method, "mu_abs_99"
    before, after = None if base is None else base.mean(key), method.mean(key)
    ratio = after / before if before and after is not None else None
    shown = "" if ratio is None else f"p99 |μ| × {ratio:.4g} without an interval; "
    return VerdictPart("open", f"{shown}{RUN_AGAIN}.", {"quantity": "|μ|", "ratio": ratio})
