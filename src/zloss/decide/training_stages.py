"""Stages that need more than a checkpoint: implementation, router reduction, optimizer consequence, quality gate."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.decide.quality import judge_quality
from zloss.decide.stage_outcome import StageOutcome, unevaluated
from zloss.decide.stages import IMPLEMENTATION, OPTIMIZER, QUALITY, ROUTER
from zloss.decide.thresholds import Thresholds
from zloss.results.comparison import ComparedMethod, Comparison
from zloss.results.decision import Effect
from zloss.results.loss_audit import LossAudit
from zloss.results.router import RouterFindings

EVENT = "phi_10"
"""Rate of steps whose pre-clip gradient norm exceeds 10."""
NONFINITE = ("nonfinite_gradient", "nonfinite_microbatch")
TAILS = ("grad_norm_p99", "grad_norm_p999", "grad_inf_p99", "phi_10", "phi_50", "phi_100", "adam_v_p99", "loss_p99")
NO_COMPARISON = "no comparison of training runs was given"
OWN_ROUTER_LOSS = "the model's own router loss (measured)"


def implementation(loss_audits: Sequence[LossAudit], thresholds: Thresholds) -> StageOutcome:
    """The largest Δ_src of the audited losses, and the findings of their audits."""
    if not loss_audits:
        return unevaluated(IMPLEMENTATION, "no audit of a loss was given")
    limit = thresholds.delta_src
    sources = [audit.source for audit in loss_audits]
    value = max((source.delta_src for source in sources if source.delta_src is not None), default=None)
    found = [finding.id for audit in loss_audits for finding in audit.found]
    if value is None and not found:
        return unevaluated(IMPLEMENTATION, "the audit of the loss holds no Δ_src")
    too_far = value is not None and value > limit
    parts = []
    if value is not None:
        parts.append(f"Δ_src = {value:.3g} {'exceeds' if too_far else 'stays within'} {limit:g}")
    parts.append("findings: " + ", ".join(found) if found else "no findings")
    effects = tuple(
        Effect("Relative error: forward value → backward source", source.forward_rel_error, source.delta_src)
        for source in sources
        if source.forward_rel_error is not None and source.delta_src is not None
    )
    return StageOutcome(value, limit, too_far or bool(found), _sentence(parts), effects)


def router_reduction(
    router: RouterFindings | None, comparisons: Sequence[Comparison], thresholds: Thresholds
) -> StageOutcome:
    """The s_rel farthest from 1: measured from the audited model's own router loss, or applied in compared runs."""
    tolerance = thresholds.router_scale_tolerance
    scales: list[tuple[str, float, float | None]] = []
    # The diagnostic convention of an audit is ours, so only a measured scale is the model's.
    if router is not None and router.applied is not None:
        scales.append((OWN_ROUTER_LOSS, router.applied.relative, router.applied.coef))
    variants = (variant for c in comparisons if c.router is not None for variant in c.router.conventions)
    scales += [(variant.convention, variant.s_rel, variant.coef) for variant in variants if variant.s_rel is not None]
    if not scales:
        if comparisons:
            reason = "The compared runs have no router, so there is no reduction to match."
            return StageOutcome(None, tolerance, False, reason)
        if router is not None:
            return unevaluated(ROUTER, "a checkpoint does not show how its router loss was reduced")
        return unevaluated(ROUTER, "no router was audited, and no compared run has one")
    name, scale, coef = max(scales, key=lambda item: abs(item[1] - 1))
    fired = abs(scale - 1) > tolerance
    reason = f"s_rel = {scale:.4g} under {name}: {'not ' if fired else ''}the scale of the token-layer mean (± {tolerance:g})."
    effects: tuple[Effect, ...] = ()
    if coef is not None and scale != 0:
        effects = (Effect("λ_R that gives s_rel = 1", coef, coef / scale, unit="λ", note=f"under {name}"),)
    return StageOutcome(scale, tolerance, fired, reason, effects)


def optimizer_consequence(comparisons: Sequence[Comparison], thresholds: Thresholds) -> StageOutcome:
    """The worst gradient tail relative to the baseline's, event rates and nonfinite steps."""
    limit = thresholds.grad_tail_ratio
    worst: tuple[float, str, ComparedMethod, ComparedMethod] | None = None
    alarms: list[str] = []
    for comparison in comparisons:
        base = comparison.baseline_method
        for method in comparison.methods:
            if base is None or method is base:
                continue
            short = comparison.has_few_steps and "grad_norm_max" in base.metrics
            quantile = "max" if short else "p99"
            tail, base_tail = (side.mean(f"grad_norm_{quantile}") for side in (method, base))
            if tail is not None and base_tail and (worst is None or tail / base_tail > worst[0]):
                worst = (tail / base_tail, quantile, method, base)
            alarms += _alarms(base, method, thresholds)
    if worst is None and not alarms:
        why = "the comparison holds no gradient tails" if comparisons else NO_COMPARISON
        return unevaluated(OPTIMIZER, why)
    if worst is None:
        return StageOutcome(None, limit, True, _sentence(alarms))
    value, quantile, method, base = worst
    tails = f"worst {quantile} gradient norm is {value:.3g} × the baseline's ({method.label}; limit {limit:g} ×)"
    fired = bool(alarms) or value > limit
    return StageOutcome(value, limit, fired, _sentence([tails, *alarms]), _tail_effects(base, method))


def _alarms(base: ComparedMethod, method: ComparedMethod, thresholds: Thresholds) -> list[str]:
    """Event rates above the baseline's, and nonfinite steps."""
    alarms = []
    events, base_events = method.mean(EVENT), base.mean(EVENT)
    if events is not None and base_events is not None and events - base_events > thresholds.event_rate_increase:
        alarms.append(f"{method.label}: Φ_10 rose from {base_events:.3g} to {events:.3g}")
    return alarms + [f"{method.label}: {key} = {rate:.3g}" for key in NONFINITE if (rate := method.mean(key))]


def _tail_effects(base: ComparedMethod, method: ComparedMethod) -> tuple[Effect, ...]:
    both = [(key, base.mean(key), method.mean(key)) for key in TAILS]
    return tuple(
        Effect(key, a, b, note=f"{base.label} → {method.label}")
        for key, a, b in both
        if a is not None and b is not None
    )


def quality_gate(comparisons: Sequence[Comparison], thresholds: Thresholds) -> StageOutcome:
    """The largest rise of PPL over the matched baseline against the stated tolerance."""
    judged = [item for comparison in comparisons for item in judge_quality(comparison, thresholds).quality]
    if not judged:
        why = "the comparison states no PPL difference" if comparisons else NO_COMPARISON
        return unevaluated(QUALITY, why)
    # A method without a partner of its seed has neither number nor verdict.
    judged = [item for item in judged if item.verdict.delta_ppl is not None or item.verdict.accepted is not None]
    if not judged:
        return unevaluated(QUALITY, "no method of the comparison shares a seed with the baseline")
    worst = max(judged, key=lambda j: float("-inf") if j.verdict.delta_ppl is None else j.verdict.delta_ppl)
    rise = worst.verdict.delta_ppl
    parts = []
    if rise is not None:
        held = f" (tolerance {worst.tolerance:.3g} PPL)" if worst.tolerance is not None else ""
        parts.append(f"the largest PPL change is {rise:+.4g}, {worst.verdict.label}{held}")
    accepted = [item.verdict.label for item in judged if item.accepted]
    rejected = [
        f"{item.verdict.label} ({item.verdict.reason})" if item.verdict.reason else item.verdict.label
        for item in judged
        if not item.accepted
    ]
    parts.append(f"rejected: {', '.join(rejected)}" if rejected else "no method is rejected")
    if rejected and accepted:
        parts.append(f"accepted: {', '.join(accepted)}")
    baselines = (method for comparison in comparisons if (method := comparison.baseline_method) is not None)
    base_ppl = next((method.mean("ppl") for method in baselines), None)
    effects = tuple(
        Effect("PPL", base_ppl, base_ppl + item.verdict.delta_ppl, note=item.verdict.label)
        for item in judged
        if base_ppl is not None and item.verdict.delta_ppl is not None
    )
    return StageOutcome(rise, worst.tolerance, bool(rejected), _sentence(parts), effects)


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]
