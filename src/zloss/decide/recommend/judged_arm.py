"""One arm against CE: its verdict, and whether its numbers point the right way.

An arm *passes* where nothing fails and every point estimate is on the good side: ΔCE within the tolerance, the quantity it
is meant to lower at least 1 % lower, and p99 ‖δ_u‖ as deployed not above that of CE on raw logits. Passing is a direction;
the verdict, from intervals, says whether it is settled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zloss.decide.recommend.candidates import GAIN_AWARE
from zloss.decide.verdicts.coordinate import EFFECT
from zloss.results.comparison import ComparedMethod, Comparison
from zloss.results.quality import QualityVerdict


@dataclass(frozen=True)
class JudgedArm:
    """What one comparison says of one arm."""

    verdict: QualityVerdict
    delta_ce: float | None
    ratio: float | None
    """Of several quantities the largest ratio."""
    transported: float | None
    objection: str
    """Why it does not pass, in a phrase; empty where it passes."""

    @property
    def key(self) -> tuple[str, float]:
        return self.verdict.method, self.verdict.coef

    @property
    def passes(self) -> bool:
        return not self.objection


def judge_arms(comparison: Comparison) -> tuple[JudgedArm, ...]:
    """Every method that shares a seed with the baseline and has a quantity to lower."""
    base = comparison.baseline_method
    if base is None:
        return ()
    by_key = {(method.method, method.coef): method for method in comparison.methods}
    judged = []
    for verdict in comparison.quality.methods:
        if verdict.parts is None or verdict.parts.coordinate is None:
            continue
        method = by_key[verdict.method, verdict.coef]
        judged.append(_judged(verdict, _transported(method, base)))
    return tuple(judged)


def ranked(arms: tuple[JudgedArm, ...]) -> tuple[JudgedArm, ...]:
    """Arms that pass by p99 ‖δ_u‖, the smallest first; then the others by ΔCE, the smallest first."""

    def place(arm: JudgedArm) -> tuple[bool, float]:
        value = arm.transported if arm.passes else arm.delta_ce
        return not arm.passes, math.inf if value is None else value

    return tuple(sorted(arms, key=place))


def _judged(verdict: QualityVerdict, transported: float | None) -> JudgedArm:
    parts = verdict.parts
    assert parts is not None
    assert parts.coordinate is not None
    quality = {} if parts.quality is None else parts.quality.numbers
    delta, tolerance = _number(quality.get("delta_ce")), _number(quality.get("tolerance_ce"))
    questions = parts.coordinate.numbers.get("questions") or [parts.coordinate.numbers]
    ratios = [_number(question.get("ratio")) for question in questions]
    known = [ratio for ratio in ratios if ratio is not None]
    ratio = max(known) if known and len(known) == len(ratios) else None
    return JudgedArm(verdict, delta, ratio, transported, _objection(verdict, delta, tolerance, ratio, transported))


def _objection(
    verdict: QualityVerdict,
    delta: float | None,
    tolerance: float | None,
    ratio: float | None,
    transported: float | None,
) -> str:
    if verdict.verdict == "rejected":
        return "rejected: " + " ".join(verdict.reasons or ()).rstrip(".")
    if delta is None:
        return "its validation CE is not finite"
    if tolerance is not None and delta > tolerance:
        return f"ΔCE = {delta:+.4g} nat is above the tolerance of {tolerance:.3g}"
    if ratio is None:
        return "the quantity it is meant to lower cannot be read"
    if ratio > math.exp(EFFECT):
        return f"the quantity it is meant to lower is × {ratio:.4g}, not at least 1 % lower"
    if transported is not None and transported > 1:
        return f"p99 ‖δ_u‖ as deployed is × {transported:.4g} that of CE"
    return ""


def _transported(method: ComparedMethod, base: ComparedMethod) -> float | None:
    """p99 ‖δ_u‖ in the coordinate and with the weight that the method deploys, over that of CE on raw logits."""
    heads = method.heads.centered if method.coordinate == "centered" else method.heads.raw
    own = heads.get("delta_u_99_gain_aware" if method.method == GAIN_AWARE else "delta_u_99")
    reference = base.heads.raw.get("delta_u_99")
    return own.mean / reference.mean if own is not None and reference is not None and reference.mean else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
