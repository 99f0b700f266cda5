"""The router stage: the scale of a router Z-loss, measured, stated, or applied in compared runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zloss.decide.stage_outcome import StageOutcome, not_of_this_model, unevaluated
from zloss.decide.stages import ROUTER
from zloss.decide.thresholds import Thresholds
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.decision import Effect
from zloss.results.router import MeasuredScale
from zloss.results.router_scale import RouterScaleTable

OWN_ROUTER_LOSS = "the model's own router loss (measured)"
GIVEN_ROUTER_LOSS = "the measured router loss"
REPLACE_ROUTER_LOSS = "Replace the penalty by λ_R·α·(log Z_R − c_R)², then measure its scale again"
CORRECT_SIGN = "Correct the sign of the router penalty, then measure its scale again"
MATCH_ELSEWHERE = "In the model that has the router, match the coefficient so that s_rel = 1"
MEASURED_ELSEWHERE = "a router loss that was measured by itself"
STATED_ELSEWHERE = "the coefficient that was stated to `zloss router-scale`"


@dataclass(frozen=True)
class _Scale:
    """One s_rel and where it comes from."""

    name: str
    relative: float
    coef: float | None
    source: str
    """Of what it is, where the audited model has no router."""
    rounding: float = 0.0
    """What rounding leaves open of a measured scale."""


def router_reduction(
    report: AuditReport | None,
    comparisons: Sequence[Comparison],
    thresholds: Thresholds,
    routers: Sequence[MeasuredScale | RouterScaleTable] = (),
) -> StageOutcome:
    """The s_rel farthest from 1: measured from a router loss, applied in compared runs, or that of a stated convention.

    A measured gradient that no squared log-normalizer explains has no s_rel, and fires by itself; so does a negative scale. A
    measurement that could not tell the penalty has no s_rel either, and does not fire. Where the audited model has no router,
    the reason says of what the scale is.
    """
    tolerance = thresholds.router_scale_tolerance
    router = None if report is None else report.router
    routerless = report is not None and _has_no_router(report)
    scales: list[_Scale] = []
    untold: list[str] = []
    # The diagnostic convention of an audit is ours, so only a measured scale is the model's.
    own = () if router is None or router.applied is None else ((OWN_ROUTER_LOSS, router.applied),)
    given = ((one.name or GIVEN_ROUTER_LOSS, one) for one in routers if isinstance(one, MeasuredScale))
    for where, measured in (*own, *given):
        foreign = _foreign(MEASURED_ELSEWHERE) if routerless else ""
        reason = f"{where}: {measured.sentence}{foreign}"
        if measured.verdict in ("not_squared", "squared_mean", "unexplained"):
            return StageOutcome(None, tolerance, True, reason, action=REPLACE_ROUTER_LOSS)
        if measured.negative_layers:
            return StageOutcome(measured.relative, tolerance, True, reason, action=CORRECT_SIGN)
        if measured.verdict == "undetermined":
            untold.append(reason)
            continue
        scales.append(_Scale(where, measured.relative, measured.coef, MEASURED_ELSEWHERE, measured.limit))
    stated = (one for one in routers if isinstance(one, RouterScaleTable))
    scales += [
        _Scale(f"{one.source} (stated)", one.scale(one.source).relative, one.coef, STATED_ELSEWHERE) for one in stated
    ]
    for comparison in comparisons:
        runs = "the compared runs" if comparison.model is None else f"the compared runs of {comparison.model}"
        variants = () if comparison.router is None else comparison.router.conventions
        scales += [_Scale(v.convention, v.s_rel, v.coef, runs) for v in variants if v.s_rel is not None]
    if not scales and untold:
        return StageOutcome(None, tolerance, None, " ".join(untold))
    if not scales:
        if comparisons and router is None:
            reason = "The compared runs have no router, so there is no reduction to match."
            return StageOutcome(None, tolerance, False, reason)
        if router is not None:
            return unevaluated(ROUTER, "a checkpoint does not show how its router loss was reduced")
        if routerless:
            return not_of_this_model(ROUTER, "the audited model has no router", "one")
        return unevaluated(ROUTER, "no router was audited, and no compared run has one")
    farthest = max(scales, key=lambda item: abs(item.relative - 1) - max(tolerance, item.rounding))
    name, scale, coef = farthest.name, farthest.relative, farthest.coef
    tolerance = max(tolerance, farthest.rounding)
    fired = abs(scale - 1) > tolerance
    reason = f"s_rel = {scale:.4g} under {name}: {'not ' if fired else ''}the scale of the token-layer mean (± {tolerance:.2g})."
    reason += _foreign(farthest.source) if routerless else ""
    effects: tuple[Effect, ...] = ()
    if coef is not None and scale != 0:
        effects = (Effect("λ_R that gives s_rel = 1", coef, coef / scale, unit="λ", note=f"under {name}"),)
    return StageOutcome(scale, tolerance, fired, reason, effects, action=MATCH_ELSEWHERE if routerless else "")


def _has_no_router(report: AuditReport) -> bool:
    """Whether the audit looked for routers and found none; an audit that left them out has a reason for it."""
    return report.router is None and report.status == "complete" and report.reason("router") is None


def _foreign(source: str) -> str:
    return f" The audited model has no router; this is of {source}."
