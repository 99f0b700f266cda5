"""Stages that need more than a checkpoint: implementation, router reduction, optimizer consequence, quality gate.

Loss audits ("zloss.loss-audit/1") and comparisons ("zloss.comparison/1") come as plain dicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zloss.decide.stage_finding import Finding, unevaluated
from zloss.decide.stages import IMPLEMENTATION, OPTIMIZER, QUALITY, ROUTER
from zloss.decide.thresholds import Thresholds
from zloss.results.audit import Effect
from zloss.results.comparison_view import FEW_STEPS, ComparisonView, MethodView

EVENT = "phi_10"
"""Rate of steps whose pre-clip gradient norm exceeds 10."""
NONFINITE = ("nonfinite_gradient", "nonfinite_microbatch")


def implementation(loss_audits: Sequence[dict[str, Any]], thresholds: Thresholds) -> Finding:
    """The largest Δ_src of the audited losses, and whatever their audits found."""
    if not loss_audits:
        return unevaluated(IMPLEMENTATION, "no audit of a loss was given")
    limit = thresholds.delta_src
    measured = [number for audit in loss_audits if (number := _number(audit.get("source"), "delta_src")) is not None]
    found = [item for audit in loss_audits for item in audit.get("findings", ()) if item.get("verdict") == "finding"]
    value = max(measured, default=None)
    if value is None and not found:
        return unevaluated(IMPLEMENTATION, "the audit of the loss holds no Δ_src")
    too_far = value is not None and value > limit
    parts = []
    if value is not None:
        parts.append(f"Δ_src = {value:.3g} {'exceeds' if too_far else 'stays within'} {limit:g}")
    parts.append("findings: " + ", ".join(str(item.get("id")) for item in found) if found else "no findings")
    sentence = "; ".join(parts) + "."
    effects = tuple(
        Effect("Relative error: forward value → backward source", forward, backward)
        for audit in loss_audits
        if (forward := _number(audit.get("source"), "forward_rel_error")) is not None
        and (backward := _number(audit.get("source"), "delta_src")) is not None
    )
    return Finding(value, limit, too_far or bool(found), sentence[0].upper() + sentence[1:], effects)


def router_reduction(
    router: dict[str, Any] | None, comparisons: Sequence[ComparisonView], thresholds: Thresholds
) -> Finding:
    """The s_rel farthest from 1 in the router section of an audit or a comparison."""
    tolerance = thresholds.router_scale_tolerance
    # The diagnostic convention of an audit is ours; only a scale that was measured from the model says what it applies.
    applied = _applied_scale(router)
    sections = [*([applied] if applied else []), *(view.router for view in comparisons if view.router)]
    scales = [scale for section in sections for scale in _scales(section)]
    if not scales:
        if comparisons:
            return Finding(
                None, tolerance, False, "The compared runs have no router, so there is no reduction to match."
            )
        if router is not None:
            return unevaluated(ROUTER, "a checkpoint does not show how its router loss was reduced")
        return unevaluated(ROUTER, "no router was audited, and no compared run has one")
    name, scale, coef = max(scales, key=lambda item: abs(item[1] - 1))
    fired = abs(scale - 1) > tolerance
    reason = f"s_rel = {scale:.4g} under {name}: {'not ' if fired else ''}the scale of the token-layer mean (± {tolerance:g})."
    effects: tuple[Effect, ...] = ()
    if coef is not None and scale != 0:
        effects = (Effect("λ_R that gives s_rel = 1", coef, coef / scale, unit="λ", note=f"under {name}"),)
    return Finding(scale, tolerance, fired, reason, effects)


def _applied_scale(router: dict[str, Any] | None) -> dict[str, Any] | None:
    """The measured s_rel of an audit's router section; other router records (comparisons, scale tables) pass as they are."""
    if router is None or "applied" not in router:
        return router
    applied = router["applied"]
    if not isinstance(applied, dict) or _number(applied, "relative") is None:
        return None
    return {
        "convention": "the model's own router loss (measured)",
        "s_rel": applied["relative"],
        "coef": applied.get("coef"),
    }


def optimizer_consequence(comparisons: Sequence[ComparisonView], thresholds: Thresholds) -> Finding:
    """The worst p99 gradient norm relative to the baseline, event rates and nonfinite steps."""
    limit = thresholds.grad_tail_ratio
    worst: tuple[float, MethodView, MethodView] | None = None
    alarms: list[str] = []
    worst_name = "p99"
    for view in comparisons:
        base = view.baseline
        for method in view.methods:
            if base is None or method is base:
                continue
            # Over few steps a p99 is little else than the maximum, and is called that.
            short = view.steps is not None and view.steps < FEW_STEPS and "grad_norm_max" in base.metrics
            tail_name = "max" if short else "p99"
            tail, base_tail = (side.metrics.get(f"grad_norm_{tail_name}") for side in (method, base))
            if tail is not None and base_tail and (worst is None or tail / base_tail > worst[0]):
                worst = (tail / base_tail, method, base)
                worst_name = tail_name
            events, base_events = method.metrics.get(EVENT), base.metrics.get(EVENT)
            if events is not None and base_events is not None and events - base_events > thresholds.event_rate_increase:
                alarms.append(f"{method.label}: Φ_10 rose from {base_events:.3g} to {events:.3g}")
            alarms += [
                f"{method.label}: {key} = {method.metrics[key]:.3g}" for key in NONFINITE if method.metrics.get(key)
            ]
    if worst is None and not alarms:
        why = (
            "no comparison of training runs was given" if not comparisons else "the comparison holds no gradient tails"
        )
        return unevaluated(OPTIMIZER, why)
    parts = list(alarms)
    value: float | None = None
    effects: tuple[Effect, ...] = ()
    if worst is not None:
        value, method, base = worst
        parts.insert(
            0, f"worst {worst_name} gradient norm is {value:.3g} × the baseline's ({method.label}; limit {limit:g} ×)"
        )
        effects = _tail_effects(base, method)
    fired = bool(alarms) or (value is not None and value > limit)
    sentence = "; ".join(parts) + "."
    return Finding(value, limit, fired, sentence[0].upper() + sentence[1:], effects)


def _tail_effects(base: MethodView, method: MethodView) -> tuple[Effect, ...]:
    keys = ("grad_norm_p99", "grad_norm_p999", "grad_inf_p99", "phi_10", "phi_50", "phi_100", "adam_v_p99", "loss_p99")
    both = [(key, base.metrics.get(key), method.metrics.get(key)) for key in keys]
    return tuple(
        Effect(key, a, b, note=f"{base.label} → {method.label}")
        for key, a, b in both
        if a is not None and b is not None
    )


def quality_gate(comparisons: Sequence[ComparisonView], thresholds: Thresholds) -> Finding:
    """The largest rise of PPL over the matched baseline against the stated tolerance."""
    rows = [(view, row) for view in comparisons for row in view.quality]
    if not rows:
        why = (
            "no comparison of training runs was given" if not comparisons else "the comparison states no PPL difference"
        )
        return unevaluated(QUALITY, why)
    # A method without a partner of its seed has neither: there is nothing to judge.
    rows = [(view, row) for view, row in rows if row.delta_ppl is not None or row.accepted is not None]
    if not rows:
        return unevaluated(QUALITY, "no method of the comparison shares a seed with the baseline")
    judged = [(row, *judge_quality(view, row.delta_ppl, row.accepted, thresholds)) for view, row in rows]
    rejected = [f"{row.label} ({row.reason})" if row.reason else row.label for row, _, ok in judged if not ok]
    worst, tolerance, _ = max(
        judged, key=lambda item: item[0].delta_ppl if item[0].delta_ppl is not None else float("-inf")
    )
    parts = []
    if worst.delta_ppl is not None:
        held = f" (tolerance {tolerance:.3g} PPL)" if tolerance is not None else ""
        parts.append(f"the largest PPL change is {worst.delta_ppl:+.4g}, {worst.label}{held}")
    accepted_labels = [row.label for row, _, accepted in judged if accepted]
    parts.append(f"rejected: {', '.join(rejected)}" if rejected else "no method is rejected")
    if rejected and accepted_labels:
        parts.append(f"accepted: {', '.join(accepted_labels)}")
    sentence = "; ".join(parts) + "."
    base_ppl = next((view.baseline.metrics.get("ppl") for view in comparisons if view.baseline), None)
    effects = tuple(
        Effect("PPL", base_ppl, base_ppl + row.delta_ppl, note=row.label)
        for row, _, _ in judged
        if base_ppl is not None and row.delta_ppl is not None
    )
    return Finding(worst.delta_ppl, tolerance, bool(rejected), sentence[0].upper() + sentence[1:], effects)


def judge_quality(
    view: ComparisonView, delta: float | None, stated: bool | None, thresholds: Thresholds
) -> tuple[float | None, bool]:
    """Tolerance in PPL and verdict; the comparison's own verdict, which also weighs the diagnosed coordinate, goes first."""
    base_ppl = view.baseline.metrics.get("ppl") if view.baseline else None
    tolerance = view.tolerance_ppl
    if tolerance is None and base_ppl is not None:
        tolerance = thresholds.quality_tolerance * base_ppl
    if stated is not None:
        return tolerance, stated
    return tolerance, delta is not None and tolerance is not None and delta <= tolerance


def _number(section: Any, key: str) -> float | None:
    value = section.get(key) if isinstance(section, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _scales(section: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """(convention, s_rel, λ_R) of a router section: one flat record, or a list under `conventions` or `methods`."""
    records = section.get("conventions") or section.get("methods") or [section]
    out = []
    for record in records:
        scale = _number(record, "s_rel") if _number(record, "s_rel") is not None else _number(record, "relative")
        if scale is not None:
            out.append(
                (
                    str(record.get("convention") or record.get("method") or "this convention"),
                    scale,
                    _number(record, "coef"),
                )
            )
    return out
