"""The decision map of the paper, evaluated: one function per stage, in the order of the map.

One module above 500 lines, because the eight stages answer one question after another and share how an answer is put together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zloss.decide.stages import (
    DECOMPOSITION,
    IMPLEMENTATION,
    OPTIMIZER,
    PATHWAY,
    QUALITY,
    ROUTER,
    SOURCE,
    TRANSPORT,
    USUAL,
    Stage,
    budget_effects,
    joined_sentence,
    lambda_budget,
    remedies_for,
    unevaluated,
    without_verdict,
)
from zloss.decide.thresholds import Thresholds, stored_thresholds
from zloss.decide.verdict import evaluated_comparison, quality_accepted
from zloss.decide.verdict_parts import EndpointLimit, endpoint_limits
from zloss.results.audit import NO_INPUT_PATH, NOT_MEASURED, AuditReport, GradientInfo
from zloss.results.comparison import ComparedMethod, Comparison, Verdict, method_label
from zloss.results.decision import Decision, Effect
from zloss.results.implementation_audit import CE, ImplementationAudit, UpdateError
from zloss.results.loss_audit import LossAudit
from zloss.results.router import MeasuredScale, RouterScaleTable


def decide(
    report: AuditReport | None,
    *,
    loss_audits: Sequence[LossAudit] = (),
    comparisons: Sequence[Comparison] = (),
    implementation_audits: Sequence[ImplementationAudit] = (),
    routers: Sequence[MeasuredScale | RouterScaleTable] = (),
    thresholds: Thresholds | None = None,
) -> tuple[Decision, ...]:
    """All eight stages in the order source → transport → optimizer → quality; an unevaluated one has fired None.

    Thresholds are those given, else those stored in the report, else the defaults.
    """
    limits = thresholds or stored_thresholds(report.thresholds if report else {})
    report = report and report.finite()
    return (
        *_on_checkpoint(report, limits),
        implementation(loss_audits, limits, implementation_audits),
        router_reduction(report, comparisons, limits, routers),
        optimizer_consequence(comparisons, limits, implementation_audits),
        quality_gate(comparisons, limits),
    )


def _on_checkpoint(report: AuditReport | None, limits: Thresholds) -> list[Decision]:
    if report is None:
        on_checkpoint = (SOURCE, DECOMPOSITION, TRANSPORT, PATHWAY)
        return [unevaluated(stage, "no audit of a checkpoint was given") for stage in on_checkpoint]
    return [
        source_coordinate(report, limits),
        objective_decomposition(report, limits),
        architectural_transport(report, limits),
        shared_pathway(report, limits),
    ]


def with_decisions(
    report: AuditReport,
    *,
    loss_audits: Sequence[LossAudit] = (),
    comparisons: Sequence[Comparison] = (),
    implementation_audits: Sequence[ImplementationAudit] = (),
    routers: Sequence[MeasuredScale | RouterScaleTable] = (),
    thresholds: Thresholds | None = None,
) -> AuditReport:
    """The report with its decisions, λ budget and the thresholds they used."""
    limits = thresholds or stored_thresholds(report.thresholds)
    return replace(
        report,
        decisions=decide(
            report,
            loss_audits=loss_audits,
            comparisons=comparisons,
            implementation_audits=implementation_audits,
            routers=routers,
            thresholds=limits,
        ),
        lambda_budget=lambda_budget(report.finite(), limits.r_z_budget),
        thresholds=limits.to_dict(),
    )


# Checkpoint


def source_coordinate(report: AuditReport, thresholds: Thresholds) -> Decision:
    """p99 |μ| against a multiple of log V."""
    value = report.heads.raw.mu_abs_99
    if value is None:
        return _missing(SOURCE, report, "heads.raw.mu_abs_99")
    log_v = math.log(report.model.valid_vocab or report.model.vocab)
    limit = thresholds.shift_over_log_v * log_v
    fired = value > limit
    verb = "exceeds" if fired else "stays within"
    reason = f"p99 |μ| = {value:.4g} {verb} {thresholds.shift_over_log_v:g} · log V = {limit:.4g}."
    return SOURCE.decision(
        value, limit, fired, reason, _centering(report) + budget_effects(report, thresholds.r_z_budget)
    )


def _missing(stage: Stage, report: AuditReport, path: str) -> Decision:
    """No verdict because the number at `path` is missing; another audit can measure it only if this one left it out."""
    why = report.reason(path) or NOT_MEASURED
    left_out = report.gradient is None and path.partition(".")[0] in ("gradient", "tied_paths")
    measurable = left_out or why == NOT_MEASURED or report.status == "partial"
    return unevaluated(stage, why) if measurable else without_verdict(stage, why)


def _centering(report: AuditReport) -> tuple[Effect, ...]:
    """Raw → centered for everything centering can move, and PPL, which it cannot."""
    raw, centered, gradient = report.heads.raw, report.heads.centered, report.gradient
    effects = [
        Effect("p99 |μ|", raw.mu_abs_99, centered.mu_abs_99, "nats"),
        Effect("P_Z^99.9", raw.p_z_999, centered.p_z_999, "nats"),
        Effect("Diag Z", raw.diag_z, centered.diag_z),
        Effect("A_p^99", raw.a_p_99, centered.a_p_99),
        Effect("p99 ‖δ_u‖", raw.delta_u_99, centered.delta_u_99),
        Effect("p99.9 row maximum", raw.row_max_999, centered.row_max_999),
        Effect("σ₁", raw.sigma_1, centered.sigma_1),
    ]
    if gradient is not None:
        effects.append(Effect("R_Z of the head", gradient.raw.r_z, gradient.centered.r_z))
    effects.append(Effect("PPL", report.ppl, report.ppl, note="softmax is unchanged by a common shift"))
    return tuple(effect for effect in effects if effect.before is not None and effect.after is not None)


def objective_decomposition(report: AuditReport, thresholds: Thresholds) -> Decision:
    """Share of the smaller of E μ² and E(log Z̃ − c)² in their sum; quiet where both are negligible."""
    raw, centered, coef = report.heads.raw, report.heads.centered, report.diag_coef
    if raw.mu_rms is None or centered.diag_z is None:
        path = "heads.raw.mu_rms" if raw.mu_rms is None else "heads.centered.diag_z"
        return _missing(DECOMPOSITION, report, path)
    shift, relative = raw.mu_rms**2, centered.diag_z / coef
    total = shift + relative
    if total == 0:
        return DECOMPOSITION.decision(
            0.0, thresholds.component_share, False, "Neither μ nor log Z̃ − c ever leaves its target."
        )
    share = min(shift, relative) / total
    floor = thresholds.negligible_rms
    if max(shift, relative) < floor**2:
        sizes = f"rms μ = {math.sqrt(shift):.3g} and rms(log Z̃ − c) = {math.sqrt(relative):.3g} nats"
        reason = f"Neither part matters: {sizes}, both below {floor:g}."
        return DECOMPOSITION.decision(share, thresholds.component_share, False, reason)
    fired = share > thresholds.component_share
    larger, smaller = ("μ", "log Z̃ − c") if shift >= relative else ("log Z̃ − c", "μ")
    if fired:
        reason = f"Both matter: E μ² = {shift:.4g} and E(log Z̃ − c)² = {relative:.4g}; the smaller holds {share:.0%}."
    else:
        sizes = f"E μ² = {shift:.4g}, E(log Z̃ − c)² = {relative:.4g}"
        reason = f"{larger} dominates: {sizes}; {smaller} holds {share:.2g} of the sum."
    effects: tuple[Effect, ...] = ()
    if raw.diag_z is not None:
        cross = raw.diag_z / coef - total
        note = f"cross term 2·E[μ(log Z̃ − c)] = {cross:.4g} removed"
        effects = (Effect("Mean penalty at λ_diag", raw.diag_z, coef * total, note=note),)
    return DECOMPOSITION.decision(
        share, thresholds.component_share, fired, reason, effects + budget_effects(report, thresholds.r_z_budget)
    )


def architectural_transport(report: AuditReport, thresholds: Thresholds) -> Decision:
    """Raw A_p^99 against the gain at which the source is halved."""
    raw, centered, beta = report.heads.raw, report.heads.centered, report.gain_beta
    if raw.a_p_99 is None:
        return _missing(TRANSPORT, report, "heads.raw.a_p_99")
    fired = raw.a_p_99 > thresholds.gain_99
    reason = f"A_p^99 = {raw.a_p_99:.4g} {'exceeds' if fired else 'stays within'} {thresholds.gain_99:g}"
    reason += f"; centered it is {centered.a_p_99:.4g}." if centered.a_p_99 is not None else "."
    weight = 1 / (1 + beta * raw.a_p_99**2)
    weighted = [Effect("Source weight at A_p^99", 1.0, weight, note=f"1/(1 + β·A_p^2), β = {beta:g}")]
    if raw.delta_u_99 is not None and raw.delta_u_99_gain_aware is not None:
        weighted.append(Effect("p99 ‖δ_u‖, gain-aware", raw.delta_u_99, raw.delta_u_99_gain_aware))
    if centered.a_p_99 is not None:
        weighted.append(Effect("A_p^99 under centering instead", raw.a_p_99, centered.a_p_99))
    if raw.delta_u_99 is not None and centered.delta_u_99 is not None:
        weighted.append(Effect("p99 ‖δ_u‖ under centering instead", raw.delta_u_99, centered.delta_u_99))
    effects = tuple(weighted) + budget_effects(report, thresholds.r_z_budget)
    return TRANSPORT.decision(raw.a_p_99, thresholds.gain_99, fired, reason, effects)


def shared_pathway(report: AuditReport, thresholds: Thresholds) -> Decision:
    """‖input path‖ / ‖output path‖ of the Z gradient on a tied table; quiet where both are negligible next to CE's.

    An untied head has no input path.
    """
    limit = thresholds.input_path_ratio
    if not report.model.tied:
        return PATHWAY.decision(None, limit, False, f"{NO_INPUT_PATH[0].upper()}{NO_INPUT_PATH[1:]}.")
    paths = report.tied_paths.raw if report.tied_paths is not None else None
    if paths is None or paths.output_norm is None or paths.input_norm is None:
        return _missing(PATHWAY, report, "tied_paths")
    if paths.output_norm == 0:
        return without_verdict(PATHWAY, "the output-path gradient is zero on the diagnostic batch, so the ratio is 0/0")
    ratio = paths.input_norm / paths.output_norm
    side = "above" if ratio > limit else "within"
    reason = f"The input path carries {ratio:.3g} × the output path's norm ({side} {limit:g})"
    effects: tuple[Effect, ...] = ()
    fired = ratio > limit
    if paths.cosine is not None:
        reason += f", cosine {paths.cosine:.3g}"
        cross = 2 * paths.cosine * paths.output_norm * paths.input_norm
        both = math.sqrt(max(paths.output_norm**2 + paths.input_norm**2 + cross, 0.0))
        effects = (Effect("‖g_Z‖ of the table: output path alone → both", paths.output_norm, both),)
        larger = _share_of_ce(report.gradient, max(paths.output_norm, paths.input_norm), both)
        if fired and larger is not None and larger < thresholds.negligible_r_z:
            fired = False
            share = f"{larger:.2g} of the CE gradient at λ = {USUAL[1]:g} (below {thresholds.negligible_r_z:g})"
            reason += f", but the larger path is {share}, so neither matters"
    return PATHWAY.decision(ratio, limit, fired, reason + ".", effects + budget_effects(report, thresholds.r_z_budget))


def _share_of_ce(gradient: GradientInfo | None, path: float, both: float) -> float | None:
    """The norm of one path over that of the CE gradient, at the end of the usual range of λ; None where it is not known.

    R_Z is that of the sum of both paths, in which they may cancel; Z gradients are linear in λ.
    """
    if gradient is None or gradient.raw.r_z is None or gradient.coef == 0 or both == 0:
        return None
    return gradient.raw.r_z * path / both * USUAL[1] / gradient.coef


# Implementation


@dataclass(frozen=True)
class _SourceError:
    """Δ_src of an audited loss, or of logits stored in one dtype."""

    name: str
    """Where the logits were stored; empty for an audited loss."""
    delta_src: float
    forward: float | None


def implementation(
    loss_audits: Sequence[LossAudit],
    thresholds: Thresholds,
    implementation_audits: Sequence[ImplementationAudit] = (),
) -> Decision:
    """The largest Δ_src and Δ_θ of the audited losses and storage dtypes, and the findings of the losses' audits.

    Δ_θ is that of the implementation audits, and of a linear loss the error of dW on bf16 operands.
    """
    if not loss_audits and not implementation_audits:
        return unevaluated(IMPLEMENTATION, "no audit of a loss or of an implementation was given")
    sources, updates = _sources(loss_audits, implementation_audits), _updates(loss_audits, implementation_audits)
    worst_source = max(sources, key=lambda source: source.delta_src, default=None)
    worst_update = max(updates, key=lambda update: update.delta_theta, default=None)
    found = [finding.id for audit in loss_audits for finding in audit.errors]
    lesser = [finding.id for audit in loss_audits for finding in audit.found if finding not in audit.errors]
    if worst_source is None and worst_update is None and not found:
        more = f" (warnings and notes: {', '.join(lesser)})" if lesser else ""
        return unevaluated(IMPLEMENTATION, f"the audits hold neither Δ_src nor Δ_θ{more}")
    parts, far = [], []
    if worst_source is not None:
        far.append(worst_source.delta_src > thresholds.delta_src)
        where = f" ({worst_source.name})" if worst_source.name else ""
        verb = "exceeds" if far[-1] else "stays within"
        parts.append(f"Δ_src = {worst_source.delta_src:.3g}{where} {verb} {thresholds.delta_src:g}")
        within = [source.name for source in sources if source.name and source.delta_src <= thresholds.delta_src]
        if far[-1] and within:
            parts.append(f"within it: {', '.join(within)}")
    if worst_update is not None:
        far.append(worst_update.delta_theta > thresholds.delta_theta)
        verb = "exceeds" if far[-1] else "stays within"
        parts.append(f"Δ_θ = {worst_update.delta_theta:.3g} ({worst_update.name}) {verb} {thresholds.delta_theta:g}")
    if loss_audits:
        parts.append("errors: " + ", ".join(found) if found else "no errors" if lesser else "no findings")
    parts += ["warnings and notes: " + ", ".join(lesser)] if lesser else []
    effects = tuple(
        Effect("Relative error: forward value → backward source", source.forward, source.delta_src, note=source.name)
        for source in sources
        # Next to another finding the two errors are not a before and after: its remedy changes neither.
        if source.forward is not None and source.delta_src > thresholds.delta_src
    )
    # Errors beyond a limit without a finding are those of stored precision.
    causes = found if found else ["low_precision_source"]
    return IMPLEMENTATION.decision(
        worst_source.delta_src if worst_source else worst_update.delta_theta if worst_update else None,
        thresholds.delta_src if worst_source or not worst_update else thresholds.delta_theta,
        any(far) or bool(found),
        joined_sentence(parts),
        effects,
        action=remedies_for(causes),
    )


def _sources(loss_audits: Sequence[LossAudit], audits: Sequence[ImplementationAudit]) -> list[_SourceError]:
    found = [
        _SourceError("", audit.source.delta_src, audit.source.forward_rel_error)
        for audit in loss_audits
        if audit.source.delta_src is not None
    ]
    # On a model's own logits a Z far smaller than CE may drown in the rounding of CE, which is not a fault of the loss.
    found += [
        _SourceError(f"the loss on {one.model}", one.delta_src, one.forward_rel_error)
        for audit in loss_audits
        if (one := audit.target_model) is not None and one.delta_src is not None and one.beyond_rounding
    ]
    return found + [
        _SourceError(f"logits of {audit.model.name} stored in {line.storage}", line.delta_src, line.forward_rel_error)
        for audit in audits
        for line in audit.own_source
        if line.delta_src is not None
    ]


def _updates(loss_audits: Sequence[LossAudit], audits: Sequence[ImplementationAudit]) -> list[UpdateError]:
    errors = [audit.source.bf16_inputs for audit in loss_audits]
    return [UpdateError("dW", error) for error in errors if error is not None] + [
        update for audit in audits for update in audit.update_errors
    ]


# Router


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
) -> Decision:
    """The s_rel farthest from 1: measured from a router loss, applied in compared runs, or that of a stated convention.

    A measured gradient that no squared log-normalizer explains has no s_rel, and fires by itself; so does a negative scale. A
    measurement that could not tell the penalty has no s_rel either, and does not fire. Where the audited model has no router,
    the reason says of what the scale is.
    """
    tolerance = thresholds.router_scale_tolerance
    router = None if report is None else report.router
    routerless = report is not None and _has_no_router(report)
    scales: list[_Scale] = []
    undetermined: list[str] = []
    # The diagnostic convention of an audit is ours, so only a measured scale is the model's.
    own = () if router is None or router.applied is None else ((OWN_ROUTER_LOSS, router.applied),)
    given = ((one.name or GIVEN_ROUTER_LOSS, one) for one in routers if isinstance(one, MeasuredScale))
    for where, measured in (*own, *given):
        foreign = _foreign(MEASURED_ELSEWHERE) if routerless else ""
        reason = f"{where}: {measured.sentence}{foreign}"
        if measured.verdict in ("not_squared", "squared_mean", "unexplained"):
            return ROUTER.decision(None, tolerance, True, reason, action=REPLACE_ROUTER_LOSS)
        if measured.negative_layers:
            return ROUTER.decision(measured.relative, tolerance, True, reason, action=CORRECT_SIGN)
        if measured.verdict == "undetermined":
            undetermined.append(reason)
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
    if not scales and undetermined:
        return ROUTER.decision(None, tolerance, None, " ".join(undetermined))
    if not scales:
        if comparisons and router is None:
            reason = "The compared runs have no router, so there is no reduction to match."
            return ROUTER.decision(None, tolerance, False, reason)
        if router is not None:
            return unevaluated(ROUTER, "a checkpoint does not show how its router loss was reduced")
        if routerless:
            return unevaluated(ROUTER, "the audited model has no router", needed="one")
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
    return ROUTER.decision(scale, tolerance, fired, reason, effects, action=MATCH_ELSEWHERE if routerless else "")


def _has_no_router(report: AuditReport) -> bool:
    """Whether the audit looked for routers and found none; an audit that left them out has a reason for it."""
    return report.router is None and report.status == "complete" and report.reason("router") is None


def _foreign(source: str) -> str:
    return f" The audited model has no router; this is of {source}."


# Training runs


@dataclass(frozen=True)
class Fp16Margin:
    """κ_min of one method and of CE on the same batches."""

    model: str
    method: str
    before: float
    """κ_min of CE."""
    after: float
    """κ_min of the method; 0 where one of its gradients is not finite."""
    limit: EndpointLimit

    @property
    def fall(self) -> float:
        """CE's κ_min over the method's."""
        return self.before / self.after if self.after > 0 else math.inf

    @property
    def passed(self) -> bool:
        """Whether the margin falls beyond its limit."""
        return bool(self.limit.passed(self.before, self.after))

    @property
    def sentence(self) -> str:
        return f"{self.method} on {self.model}: {self.limit.sentence(self.before, self.after)}"

    @property
    def effect(self) -> Effect:
        return Effect("kappa_min", self.before, self.after, note=f"ce → {self.method}, gradients of {self.model}")


def fp16_margins(audits: Sequence[ImplementationAudit], thresholds: Thresholds) -> list[Fp16Margin]:
    """Every method but CE, where the audit has both margins."""
    limit = EndpointLimit("kappa_min", "smallest safe fp16 scale κ", "falls", thresholds.fp16_margin_ratio)
    margins = []
    for audit in audits:
        base = next((line.kappa_min for line in audit.overflow if line.method == CE), None)
        for line in audit.overflow:
            # A zero gradient has no largest scale, so its margin is infinite and nothing compares with it.
            if base is not None and math.isfinite(base) and line.method != CE and line.kappa_min is not None:
                method = method_label(line.method, line.coef)
                margins.append(Fp16Margin(audit.model.name, method, base, line.kappa_min, limit))
    return margins


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
) -> Decision:
    """Every optimizer-facing endpoint beyond its limit, on means over seeds; the value is the worst gradient tail.

    The fp16 margin of an implementation audit can fire the stage. Alone it cannot make it quiet: it says nothing about the
    gradients of a training run.
    """
    limit = thresholds.grad_tail_ratio
    worst: tuple[float, str, ComparedMethod, ComparedMethod] | None = None
    margins = fp16_margins(implementation_audits, thresholds)
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
            return OPTIMIZER.decision(smallest.fall, at, True, joined_sentence(alarms), effects + lost)
        return OPTIMIZER.decision(None, limit, True, joined_sentence(alarms), effects + lost)
    value, quantile, method, base = worst
    limit = thresholds.grad_max_ratio if quantile == "max" else limit
    tails = f"worst {quantile} gradient norm is {value:.3g} × the baseline's ({method.label}; limit {limit:g} ×)"
    quiet = [smallest.sentence] if smallest is not None and not smallest.passed else []
    shown = effects if effects and value <= limit else _tail_effects(base, method) if value > limit else ()
    fired = bool(alarms) or value > limit
    return OPTIMIZER.decision(value, limit, fired, joined_sentence([tails, *alarms, *quiet]), shown + lost)


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


def quality_gate(comparisons: Sequence[Comparison], thresholds: Thresholds) -> Decision:
    """The largest rise of CE and PPL over the matched baseline of each comparison, against the stated tolerance."""
    compared = [
        (evaluated, stated, verdict)
        for comparison in comparisons
        for evaluated in [evaluated_comparison(comparison, thresholds)]
        for stated, verdict in zip(comparison.quality.methods, evaluated.quality.methods, strict=True)
    ]
    if not compared:
        why = "the comparison states no PPL difference" if comparisons else NO_COMPARISON
        return unevaluated(QUALITY, why)
    # A method without a partner of its seed has neither number nor verdict.
    compared = [each for each in compared if each[2].delta_ppl is not None or each[2].accepted is not None]
    if not compared:
        return unevaluated(QUALITY, "no method of the comparison shares a seed with the baseline")
    accepted, rejected = list[str](), list[str]()
    for comparison, stated, verdict in compared:
        if quality_accepted(stated, verdict, comparison.quality.tolerance_ppl):
            accepted.append(verdict.label)
        else:
            rejected.append(_with_reason(verdict))
    comparison, _, worst = max(compared, key=lambda each: _relative_rise(each[0], each[2]))
    tolerance, rise, parts = comparison.quality.tolerance_ppl, worst.delta_ppl, []
    if rise is not None:
        part = None if worst.parts is None else worst.parts.quality
        nats = None if part is None else part.numbers.get("delta_ce")
        in_nats = f" ({nats:+.4g} nat)" if isinstance(nats, float) else ""
        held = f" (tolerance {tolerance:.3g} PPL)" if tolerance is not None else ""
        parts.append(f"the largest PPL change is {rise:+.4g}{in_nats}, {worst.label}{held}")
    parts.append(f"rejected: {', '.join(rejected)}" if rejected else "no method is rejected for its quality")
    if rejected and accepted:
        parts.append(f"within the tolerance: {', '.join(accepted)}")
    effects = tuple(effect for comparison, _, verdict in compared for effect in _quality_effects(comparison, verdict))
    return QUALITY.decision(rise, tolerance, bool(rejected), joined_sentence(parts), effects)


def _relative_rise(comparison: Comparison, verdict: Verdict) -> float:
    """Rise of PPL as a share of the baseline's: two comparisons have different baselines."""
    base = comparison.baseline_method
    ppl = None if base is None else base.mean("ppl")
    rise = verdict.delta_ppl
    return float("-inf") if rise is None else rise / ppl if ppl else rise


def _with_reason(verdict: Verdict) -> str:
    part = None if verdict.parts is None else verdict.parts.quality
    why = part.reason.rstrip(".") if part is not None and part.state == "fails" else ""
    why = why or ("" if verdict.parts is not None else verdict.reason)
    return f"{verdict.label} ({why})" if why else verdict.label


def _quality_effects(comparison: Comparison, verdict: Verdict) -> tuple[Effect, ...]:
    """PPL and CE of the comparison's own baseline → of the method."""
    base = comparison.baseline_method
    ppl, rise = None if base is None else base.mean("ppl"), verdict.delta_ppl
    if base is None or ppl is None or not rise:
        return ()
    note = f"{base.label} → {verdict.label}"
    effects = [Effect("PPL", ppl, ppl + rise, note=note)]
    method = next((m for m in comparison.methods if (m.method, m.coef) == (verdict.method, verdict.coef)), None)
    before, after = base.mean("ce"), None if method is None else method.mean("ce")
    if before is not None and after is not None:
        effects.append(Effect("CE", before, after, unit="nats", note=note))
    return tuple(effects)
