"""Stages that read compared runs: optimizer consequence, quality gate."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.decide.fp16_margins import judged_margins
from zloss.decide.quality import QualityJudgement, judge_comparison
from zloss.decide.stage_outcome import StageOutcome, joined_sentence, unevaluated
from zloss.decide.stages import OPTIMIZER, QUALITY
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdicts.optimizer import endpoint_limits
from zloss.results.comparison import ComparedMethod, Comparison
from zloss.results.decision import Effect
from zloss.results.implementation_audit import ImplementationAudit

NONFINITE = ("nonfinite_gradient", "nonfinite_microbatch")
TAILS = (
    "grad_norm_p99",
    "grad_norm_p999",
    "grad_norm_max",
    "grad_inf_p99",
    "phi_10",
    "phi_50",
    "phi_100",
    "adam_v_max",
    "adam_v_p99",
    "spike_rate",
    "kappa_min",
    "loss_p99",
)
NO_COMPARISON = "no comparison of training runs was given"


def optimizer_consequence(
    comparisons: Sequence[Comparison],
    thresholds: Thresholds,
    implementation_audits: Sequence[ImplementationAudit] = (),
) -> StageOutcome:
    """Every optimizer-facing endpoint beyond its limit, on means over seeds; the value is the worst gradient tail.

    The fp16 margin of an implementation audit can fire the stage. Alone it cannot make it quiet: it says nothing about the
    gradients of a training run.
    """
    limit = thresholds.grad_tail_ratio
    worst: tuple[float, str, ComparedMethod, ComparedMethod] | None = None
    margins = judged_margins(implementation_audits, thresholds)
    alarms: list[str] = []
    effects: tuple[Effect, ...] = ()
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
            if found := _alarms(comparison, base, method, thresholds):
                effects = effects or _tail_effects(base, method)
                alarms += found
    smallest = max(margins, key=lambda margin: margin.fall, default=None)
    alarms += [margin.sentence for margin in margins if margin.passed]
    lost = tuple(margin.effect for margin in margins if margin.passed)
    if worst is None and not alarms:
        why = "the comparison holds no gradient tails" if comparisons else NO_COMPARISON
        held = "" if smallest is None else f"the fp16 margin stays within its limit ({smallest.sentence}), but "
        return unevaluated(OPTIMIZER, held + why)
    if worst is None:
        if smallest is not None and smallest.passed and not comparisons:
            at = thresholds.fp16_margin_ratio
            return StageOutcome(smallest.fall, at, True, joined_sentence(alarms), effects + lost)
        return StageOutcome(None, limit, True, joined_sentence(alarms), effects + lost)
    value, quantile, method, base = worst
    limit = thresholds.grad_max_ratio if quantile == "max" else limit
    tails = f"worst {quantile} gradient norm is {value:.3g} × the baseline's ({method.label}; limit {limit:g} ×)"
    quiet = [smallest.sentence] if smallest is not None and not smallest.passed else []
    shown = effects if effects and value <= limit else _tail_effects(base, method) if value > limit else ()
    fired = bool(alarms) or value > limit
    return StageOutcome(value, limit, fired, joined_sentence([tails, *alarms, *quiet]), shown + lost)


def _alarms(comparison: Comparison, base: ComparedMethod, method: ComparedMethod, thresholds: Thresholds) -> list[str]:
    """Endpoints beyond their limits, and nonfinite steps whatever the baseline has."""
    limits = endpoint_limits(thresholds, base.metrics.keys() & method.metrics.keys(), comparison.steps)
    alarms = []
    for limit in limits:
        before, after = base.mean(limit.key), method.mean(limit.key)
        if limit.key in NONFINITE or before is None or after is None:
            continue
        if limit.passed(before, after):
            alarms.append(f"{method.label}: {limit.sentence(before, after)}")
    return alarms + [f"{method.label}: {key} = {rate:.3g}" for key in NONFINITE if (rate := method.mean(key))]


def _tail_effects(base: ComparedMethod, method: ComparedMethod) -> tuple[Effect, ...]:
    both = [(key, base.mean(key), method.mean(key)) for key in TAILS]
    return tuple(
        Effect(key, a, b, note=f"{base.label} → {method.label}")
        for key, a, b in both
        if a is not None and b is not None and a != b
    )


def quality_gate(comparisons: Sequence[Comparison], thresholds: Thresholds) -> StageOutcome:
    """The largest rise of CE and PPL over the matched baseline of each comparison, against the stated tolerance."""
    judged = [
        (comparison, item) for comparison in comparisons for item in judge_comparison(comparison, thresholds).quality
    ]
    if not judged:
        why = "the comparison states no PPL difference" if comparisons else NO_COMPARISON
        return unevaluated(QUALITY, why)
    # A method without a partner of its seed has neither number nor verdict.
    judged = [
        (comparison, item)
        for comparison, item in judged
        if item.verdict.delta_ppl is not None or item.verdict.accepted is not None
    ]
    if not judged:
        return unevaluated(QUALITY, "no method of the comparison shares a seed with the baseline")
    _, worst = max(judged, key=lambda pair: _rise(*pair))
    rise = worst.verdict.delta_ppl
    parts = []
    if rise is not None:
        part = None if worst.verdict.parts is None else worst.verdict.parts.quality
        nats = None if part is None else part.numbers.get("delta_ce")
        in_nats = f" ({nats:+.4g} nat)" if isinstance(nats, float) else ""
        held = f" (tolerance {worst.tolerance:.3g} PPL)" if worst.tolerance is not None else ""
        parts.append(f"the largest PPL change is {rise:+.4g}{in_nats}, {worst.verdict.label}{held}")
    accepted = [item.verdict.label for _, item in judged if item.accepted]
    rejected = [_named(item) for _, item in judged if not item.accepted]
    parts.append(f"rejected: {', '.join(rejected)}" if rejected else "no method is rejected for its quality")
    if rejected and accepted:
        parts.append(f"within the tolerance: {', '.join(accepted)}")
    effects = tuple(effect for comparison, item in judged for effect in _quality_effects(comparison, item))
    return StageOutcome(rise, worst.tolerance, bool(rejected), joined_sentence(parts), effects)


def _rise(comparison: Comparison, item: QualityJudgement) -> float:
    """Relative rise of PPL: two comparisons have baselines of their own."""
    base = comparison.baseline_method
    ppl = None if base is None else base.mean("ppl")
    rise = item.verdict.delta_ppl
    return float("-inf") if rise is None else rise / ppl if ppl else rise


def _named(item: QualityJudgement) -> str:
    part = None if item.verdict.parts is None else item.verdict.parts.quality
    why = part.reason.rstrip(".") if part is not None and part.state == "fails" else ""
    why = why or ("" if item.verdict.parts is not None else item.verdict.reason)
    return f"{item.verdict.label} ({why})" if why else item.verdict.label


def _quality_effects(comparison: Comparison, item: QualityJudgement) -> tuple[Effect, ...]:
    """PPL and CE of the comparison's own baseline → of the method."""
    base = comparison.baseline_method
    ppl, rise = None if base is None else base.mean("ppl"), item.verdict.delta_ppl
    if base is None or ppl is None or not rise:
        return ()
    note = f"{base.label} → {item.verdict.label}"
    effects = [Effect("PPL", ppl, ppl + rise, note=note)]
    method = next(
        (m for m in comparison.methods if (m.method, m.coef) == (item.verdict.method, item.verdict.coef)), None
    )
    before, after = base.mean("ce"), None if method is None else method.mean("ce")
    if before is not None and after is not None:
        effects.append(Effect("CE", before, after, unit="nats", note=note))
    return tuple(effects)
