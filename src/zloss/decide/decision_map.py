"""The decision map of the paper, evaluated: one function per stage, in the order of the map.

One module above 500 lines, because the eight stages are read one after another and share how an answer is put together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypedDict, Unpack

from zloss.decide.consequences import consequence_of, give_verdict
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
    lambda_budget,
    remedies_for,
    sentence,
)
from zloss.decide.thresholds import Thresholds, stored_thresholds
from zloss.decide.verdict import evaluated_comparison, quality_accepted
from zloss.decide.verdict_parts import EndpointLimit, endpoint_limits
from zloss.results.audit import NO_INPUT_PATH, NOT_MEASURED, AuditReport
from zloss.results.comparison import ComparedMethod, Comparison, Verdict, method_label
from zloss.results.decision import Decision, Effect
from zloss.results.implementation_audit import CE, ImplementationAudit
from zloss.results.loss_audit import LossAudit
from zloss.results.recommendation import Recommendation
from zloss.results.router import MeasuredScale, RouterScaleTable


class Joined(TypedDict, total=False):
    """Results that fill the stages which the audit of a checkpoint leaves open."""

    loss_audits: Sequence[LossAudit]
    comparisons: Sequence[Comparison]
    implementation_audits: Sequence[ImplementationAudit]
    routers: Sequence[MeasuredScale | RouterScaleTable]


def decide(
    report: AuditReport | None, *, thresholds: Thresholds | None = None, **joined: Unpack[Joined]
) -> tuple[Decision, ...]:
    """All eight stages in the order source → transport → optimizer → quality; an unevaluated one has fired None.

    Each has its consequence for the planned training. Thresholds are those given, else those stored in the report, else the
    defaults.
    """
    limits = thresholds or stored_thresholds(report.thresholds if report else {})
    report = report and report.finite()
    losses, implementations = joined.get("loss_audits", ()), joined.get("implementation_audits", ())
    comparisons = joined.get("comparisons", ())
    on_checkpoint = {
        SOURCE: source_coordinate,
        DECOMPOSITION: objective_decomposition,
        TRANSPORT: architectural_transport,
        PATHWAY: shared_pathway,
    }
    decisions = (
        *(
            stage.unevaluated("no audit of a checkpoint was given") if report is None else evaluate(report, limits)
            for stage, evaluate in on_checkpoint.items()
        ),
        implementation(losses, limits, implementations),
        router_reduction(report, comparisons, limits, joined.get("routers", ())),
        optimizer_consequence(comparisons, limits, implementations),
        quality_gate(comparisons, limits),
    )
    return tuple(
        replace(one, consequence=consequence_of(one, report, limits, losses, implementations)) for one in decisions
    )


def with_decisions(
    report: AuditReport,
    *,
    recommendations: Sequence[Recommendation] = (),
    thresholds: Thresholds | None = None,
    **joined: Unpack[Joined],
) -> AuditReport:
    """The report with its verdict, its decisions, the λ budget and the thresholds they used."""
    limits, finite = thresholds or stored_thresholds(report.thresholds), report.finite()
    decisions = decide(report, thresholds=limits, **joined)
    return replace(
        report,
        verdict=give_verdict(finite, decisions, limits, joined.get("comparisons", ()), recommendations),
        decisions=decisions,
        lambda_budget=lambda_budget(finite, limits.r_z_budget),
        thresholds=limits.to_dict(),
    )


def _verb(beyond: bool) -> str:
    return "exceeds" if beyond else "stays within"


# Checkpoint


def _missing(stage: Stage, report: AuditReport, path: str) -> Decision:
    """No verdict because the number at `path` is missing; another audit can measure it only if this one left it out."""
    why = report.reason(path) or NOT_MEASURED
    left_out = report.gradient is None and path.startswith("tied_paths")
    return (stage.unevaluated if left_out or why == NOT_MEASURED or report.status == "partial" else stage.impossible)(
        why
    )


def source_coordinate(report: AuditReport, thresholds: Thresholds) -> Decision:
    """p99 |μ| against a multiple of log V; centering changes the other numbers too, and PPL not."""
    raw, centered, gradient = report.heads.raw, report.heads.centered, report.gradient
    value = raw.mu_abs_99
    if value is None:
        return _missing(SOURCE, report, "heads.raw.mu_abs_99")
    limit = thresholds.shift_over_log_v * math.log(report.model.valid_vocab or report.model.vocab)
    fired = value > limit
    reason = f"p99 |μ| = {value:.4g} {_verb(fired)} {thresholds.shift_over_log_v:g} · log V = {limit:.4g}."
    effects = [
        Effect("p99 |μ|", value, centered.mu_abs_99, "nats"),
        Effect("P_Z^99.9", raw.p_z_999, centered.p_z_999, "nats"),
        Effect("Diag Z", raw.diag_z, centered.diag_z),
        Effect("A_p^99", raw.a_p_99, centered.a_p_99),
        Effect("p99 ‖δ_u‖", raw.delta_u_99, centered.delta_u_99),
        Effect("p99.9 row maximum", raw.row_max_999, centered.row_max_999),
        Effect("σ₁", raw.sigma_1, centered.sigma_1),
        *([Effect("R_Z of the head", gradient.raw.r_z, gradient.centered.r_z)] if gradient is not None else []),
        Effect("PPL", report.ppl, report.ppl, note="softmax is unchanged by a common shift"),
    ]
    return SOURCE.decision(value, limit, fired, reason, effects + budget_effects(report, thresholds.r_z_budget))


def objective_decomposition(report: AuditReport, thresholds: Thresholds) -> Decision:
    """Share of the smaller of E μ² and E(log Z̃ − c)² in their sum; quiet if both are negligible."""
    raw, centered, coef = report.heads.raw, report.heads.centered, report.diag_coef
    if raw.mu_rms is None or centered.diag_z is None:
        path = "heads.raw.mu_rms" if raw.mu_rms is None else "heads.centered.diag_z"
        return _missing(DECOMPOSITION, report, path)
    shift, relative = raw.mu_rms**2, centered.diag_z / coef
    total, limit, floor = shift + relative, thresholds.component_share, thresholds.negligible_rms
    share = min(shift, relative) / total if total else 0.0
    negligible = max(shift, relative) < floor**2
    fired = share > limit and not negligible
    if negligible:
        sizes = f"rms μ = {math.sqrt(shift):.3g} and rms(log Z̃ − c) = {math.sqrt(relative):.3g} nats"
        reason = f"Neither part matters: {sizes}, both below {floor:g}."
    elif fired:
        reason = f"Both matter: E μ² = {shift:.4g} and E(log Z̃ − c)² = {relative:.4g}; the smaller is {share:.0%} of the sum."
    else:
        larger, smaller = ("μ", "log Z̃ − c") if shift >= relative else ("log Z̃ − c", "μ")
        sizes = f"E μ² = {shift:.4g}, E(log Z̃ − c)² = {relative:.4g}"
        reason = f"{larger} dominates: {sizes}; {smaller} is {share:.2g} of the sum."
    effects = budget_effects(report, thresholds.r_z_budget)
    if raw.diag_z is not None:
        note = f"cross term 2·E[μ(log Z̃ − c)] = {raw.diag_z / coef - total:.4g} removed"
        effects.insert(0, Effect("Mean penalty at λ_diag", raw.diag_z, coef * total, note=note))
    return DECOMPOSITION.decision(share, limit, fired, reason, effects)


def architectural_transport(report: AuditReport, thresholds: Thresholds) -> Decision:
    """Raw A_p^99 against the gain at which the source is halved."""
    raw, centered, beta = report.heads.raw, report.heads.centered, report.gain_beta
    if raw.a_p_99 is None:
        return _missing(TRANSPORT, report, "heads.raw.a_p_99")
    fired = raw.a_p_99 > thresholds.gain_99
    reason = f"A_p^99 = {raw.a_p_99:.4g} {_verb(fired)} {thresholds.gain_99:g}"
    reason += f"; centered it is {centered.a_p_99:.4g}." if centered.a_p_99 is not None else "."
    weight = 1 / (1 + beta * raw.a_p_99**2)
    effects = [
        Effect("Source weight at A_p^99", 1.0, weight, note=f"1/(1 + β·A_p^2), β = {beta:g}"),
        Effect("p99 ‖δ_u‖, gain-aware", raw.delta_u_99, raw.delta_u_99_gain_aware),
        Effect("A_p^99 under centering instead", raw.a_p_99, centered.a_p_99),
        Effect("p99 ‖δ_u‖ under centering instead", raw.delta_u_99, centered.delta_u_99),
        *budget_effects(report, thresholds.r_z_budget),
    ]
    return TRANSPORT.decision(raw.a_p_99, thresholds.gain_99, fired, reason, effects)


def shared_pathway(report: AuditReport, thresholds: Thresholds) -> Decision:
    """‖input path‖ / ‖output path‖ of the Z gradient on a tied table; quiet if both are negligible next to CE's.

    An untied head has no input path.
    """
    limit, gradient = thresholds.input_path_ratio, report.gradient
    if not report.model.tied:
        return PATHWAY.decision(None, limit, False, sentence(NO_INPUT_PATH))
    paths = report.tied_paths.raw if report.tied_paths is not None else None
    if paths is None or paths.output_norm is None or paths.input_norm is None:
        return _missing(PATHWAY, report, "tied_paths")
    if paths.output_norm == 0:
        return PATHWAY.impossible("the output-path gradient is zero on the diagnostic batch, so the ratio is 0/0")
    ratio = paths.input_norm / paths.output_norm
    fired = ratio > limit
    side = "above" if fired else "within"
    reason = f"The input path carries {ratio:.3g} × the output path's norm ({side} {limit:g})"
    effects = budget_effects(report, thresholds.r_z_budget)
    if paths.cosine is not None:
        reason += f", cosine {paths.cosine:.3g}"
        cross = 2 * paths.cosine * paths.output_norm * paths.input_norm
        both = math.sqrt(max(paths.output_norm**2 + paths.input_norm**2 + cross, 0.0))
        effects.insert(0, Effect("‖g_Z‖ of the table: output path alone → both", paths.output_norm, both))
        if fired and both and gradient is not None and gradient.raw.r_z is not None and gradient.coef:
            # R_Z is that of the sum of both paths, in which they may cancel; Z gradients are linear in λ.
            larger = gradient.raw.r_z * max(paths.output_norm, paths.input_norm) / both * USUAL[1] / gradient.coef
            if larger < thresholds.negligible_r_z:
                fired = False
                share = f"{larger:.2g} of the CE gradient at λ = {USUAL[1]:g} (below {thresholds.negligible_r_z:g})"
                reason += f", but the larger path is {share}, so neither matters"
    return PATHWAY.decision(ratio, limit, fired, reason + ".", effects)


# Implementation


def implementation(
    loss_audits: Sequence[LossAudit],
    thresholds: Thresholds,
    implementation_audits: Sequence[ImplementationAudit] = (),
) -> Decision:
    """The largest Δ_src and Δ_θ of the audited losses and storage dtypes, and the findings of the losses' audits.

    Δ_θ is that of the implementation audits, and of a linear loss the error of dW on bf16 operands.
    """
    if not loss_audits and not implementation_audits:
        return IMPLEMENTATION.unevaluated("no audit of a loss or of an implementation was given")
    targets = [audit.target_model for audit in loss_audits if audit.target_model is not None]
    # (error, where, error of the forward value); an error that was not measured is None.
    sources = [
        *((audit.source.delta_src, "", audit.source.forward_rel_error) for audit in loss_audits),
        # On a model's own logits a Z far smaller than CE may drown in the rounding of CE, which is not a fault of the loss.
        *((t.delta_src, f"the loss on {t.model}", t.forward_rel_error) for t in targets if t.beyond_rounding),
        *(
            (line.delta_src, f"logits of {audit.model.name} stored in {line.storage}", line.forward_rel_error)
            for audit in implementation_audits
            for line in audit.own_source
        ),
    ]
    updates = [
        *((audit.source.bf16_inputs, "dW", None) for audit in loss_audits),
        *((update.delta_theta, update.name, None) for audit in implementation_audits for update in audit.update_errors),
    ]
    found = [finding.id for audit in loss_audits for finding in audit.errors]
    lesser = [finding.id for audit in loss_audits for finding in audit.found if finding not in audit.errors]
    parts, worst = list[str](), list[tuple[float, float]]()
    for symbol, errors, limit in (("Δ_src", sources, thresholds.delta_src), ("Δ_θ", updates, thresholds.delta_theta)):
        known = [(error, where) for error, where, _ in errors if error is not None]
        if not known:
            continue
        error, where = max(known, key=lambda each: each[0])
        worst.append((error, limit))
        parts.append(f"{symbol} = {error:.3g}{f' ({where})' if where else ''} {_verb(error > limit)} {limit:g}")
        within = [name for other, name in known if name and other <= limit]
        if symbol == "Δ_src" and error > limit and within:
            parts.append(f"within it: {', '.join(within)}")
    warned = [f"warnings and notes: {', '.join(lesser)}"] if lesser else []
    if not worst and not found:
        more = f" ({warned[0]})" if warned else ""
        return IMPLEMENTATION.unevaluated(f"the audits have neither Δ_src nor Δ_θ{more}")
    if loss_audits:
        parts.append("errors: " + ", ".join(found) if found else "no errors" if lesser else "no findings")
    effects = [
        Effect("Relative error: forward value → backward source", forward, error, note=where)
        for error, where, forward in sources
        # Next to another finding the two errors are not a before and after: its remedy changes neither.
        if error is not None and error > thresholds.delta_src
    ]
    value, limit = worst[0] if worst else (None, thresholds.delta_src)
    return IMPLEMENTATION.decision(
        value,
        limit,
        bool(found) or any(error > most for error, most in worst),
        sentence(*parts, *warned),
        effects,
        # Errors beyond a limit without a finding are those of stored precision.
        action=remedies_for(found or ["low_precision_source"]),
    )


# Router


OWN_ROUTER_LOSS = "the model's own router loss (measured)"
GIVEN_ROUTER_LOSS = "the measured router loss"
REPLACE_ROUTER_LOSS = "Replace the penalty by λ_R·α·(log Z_R − c_R)², then measure its scale again"
CORRECT_SIGN = "Correct the sign of the router penalty, then measure its scale again"
MATCH_ELSEWHERE = "In the model that has the router, match the coefficient so that s_rel = 1"
MEASURED_ELSEWHERE = "a router loss that was measured by itself"
STATED_ELSEWHERE = "the coefficient that was stated to `zloss router-scale`"


class _Scale(NamedTuple):
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
    tolerance, router = thresholds.router_scale_tolerance, None if report is None else report.router
    # An audit that left the routers out has a reason for it.
    routerless = (
        report is not None and router is None and report.status == "complete" and report.reason("router") is None
    )
    foreign = " The audited model has no router; this comes from {}." if routerless else ""
    scales, undetermined = list[_Scale](), list[str]()
    # The diagnostic convention of an audit is ours, so only a measured scale is the model's.
    own = [] if router is None or router.applied is None else [(OWN_ROUTER_LOSS, router.applied)]
    given = [(one.name or GIVEN_ROUTER_LOSS, one) for one in routers if isinstance(one, MeasuredScale)]
    for where, measured in own + given:
        reason = f"{where}: {measured.sentence}{foreign.format(MEASURED_ELSEWHERE)}"
        if measured.verdict in ("not_squared", "squared_mean", "unexplained"):
            return ROUTER.decision(None, tolerance, True, reason, action=REPLACE_ROUTER_LOSS)
        if measured.negative_layers:
            return ROUTER.decision(measured.relative, tolerance, True, reason, action=CORRECT_SIGN)
        if measured.verdict == "undetermined":
            undetermined.append(reason)
        else:
            scales.append(_Scale(where, measured.relative, measured.coef, MEASURED_ELSEWHERE, measured.limit))
    scales += [
        _Scale(f"{one.source} (stated)", one.scale(one.source).relative, one.coef, STATED_ELSEWHERE)
        for one in routers
        if isinstance(one, RouterScaleTable)
    ]
    for comparison in comparisons:
        runs = "the compared runs" if comparison.model is None else f"the compared runs of {comparison.model}"
        variants = () if comparison.router is None else comparison.router.conventions
        scales += [_Scale(v.convention, v.s_rel, v.coef, runs) for v in variants if v.s_rel is not None]
    if not scales:
        if undetermined:
            return ROUTER.decision(None, tolerance, None, " ".join(undetermined))
        if comparisons and router is None:
            reason = "The compared runs have no router, so there is no reduction to match."
            return ROUTER.decision(None, tolerance, False, reason)
        if router is not None:
            return ROUTER.unevaluated("a checkpoint does not show how its router loss was reduced")
        if routerless:
            return ROUTER.unevaluated("the audited model has no router", needed="one")
        return ROUTER.unevaluated("no router was audited, and none of the compared runs has one")
    farthest = max(scales, key=lambda item: abs(item.relative - 1) - max(tolerance, item.rounding))
    name, scale, coef = farthest.name, farthest.relative, farthest.coef
    tolerance = max(tolerance, farthest.rounding)
    fired = abs(scale - 1) > tolerance
    reason = f"s_rel = {scale:.4g} under {name}: {'not ' if fired else ''}the scale of the token-layer mean (± {tolerance:.2g})."
    matched = None if coef is None or scale == 0 else coef / scale
    effect = Effect("λ_R that gives s_rel = 1", coef, matched, unit="λ", note=f"under {name}")
    action = MATCH_ELSEWHERE if routerless else ""
    return ROUTER.decision(scale, tolerance, fired, reason + foreign.format(farthest.source), [effect], action)


# Training runs


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
    worst: tuple[float, str, list[Effect], str] | None = None
    alarms, effects = list[str](), list[Effect]()
    for comparison in comparisons:
        base = comparison.baseline_method
        for method in comparison.methods:
            if base is None or method is base:
                continue
            quantile = "max" if comparison.has_few_steps and "grad_norm_max" in base.metrics else "p99"
            tail, base_tail = (side.mean(f"grad_norm_{quantile}") for side in (method, base))
            changes = [
                Effect(key, base.mean(key), method.mean(key), note=f"{base.label} → {method.label}")
                for key in TAILS
                if base.mean(key) != method.mean(key) and None not in (base.mean(key), method.mean(key))
            ]
            if tail is not None and base_tail and (worst is None or tail / base_tail > worst[0]):
                worst = (tail / base_tail, quantile, changes, method.label)
            if found := _alarms(comparison, base, method, thresholds):
                effects = effects or changes
                alarms += found
    margins = _fp16_margins(implementation_audits, thresholds.fp16_margin_ratio)
    lost = [margin for margin in margins if margin.lost]
    alarms += [margin.said for margin in lost]
    narrowest = max(margins, key=lambda margin: margin.fall, default=None)
    if worst is None and not alarms:
        why = "the comparison has no gradient tails" if comparisons else NO_COMPARISON
        held = "" if narrowest is None else f"the fp16 margin stays within its limit ({narrowest.said}), but "
        return OPTIMIZER.unevaluated(held + why)
    value, limit, parts = None, thresholds.grad_tail_ratio, alarms
    if worst is not None:
        value, quantile, changes, label = worst
        limit = thresholds.grad_max_ratio if quantile == "max" else limit
        effects = changes if value > limit else effects
        tails = f"worst {quantile} gradient norm is {value:.3g} × the baseline's ({label}; limit {limit:g} ×)"
        parts = [tails, *alarms, *([narrowest.said] if narrowest is not None and not narrowest.lost else [])]
    elif not comparisons and narrowest is not None:
        value, limit = narrowest.fall, thresholds.fp16_margin_ratio
    fired = bool(alarms) or (value is not None and value > limit)
    return OPTIMIZER.decision(value, limit, fired, sentence(*parts), [*effects, *(margin.effect for margin in lost)])


class _Fp16Margin(NamedTuple):
    """κ_min of a method next to that of CE on the same batches."""

    lost: bool
    """Beyond its limit."""
    fall: float
    """κ_min of CE over that of the method."""
    said: str
    effect: Effect


def _fp16_margins(audits: Sequence[ImplementationAudit], ratio: float) -> list[_Fp16Margin]:
    """Every method but CE, where the audit has both margins."""
    limit, margins = EndpointLimit("kappa_min", "largest safe fp16 scale κ", "falls", ratio), []
    for audit in audits:
        base = next((line.kappa_min for line in audit.overflow if line.method == CE), None)
        for line in audit.overflow:
            after, method = line.kappa_min, method_label(line.method, line.coef)
            # A zero gradient has no largest scale, so its margin is infinite and nothing compares with it.
            if base is None or not math.isfinite(base) or line.method == CE or after is None:
                continue
            said = f"{method} on {audit.model.name}: {limit.sentence(base, after)}"
            effect = Effect("kappa_min", base, after, note=f"ce → {method}, gradients of {audit.model.name}")
            margins.append(_Fp16Margin(limit.passed(base, after), limit.excess(base, after), said, effect))
    return margins


def _alarms(comparison: Comparison, base: ComparedMethod, method: ComparedMethod, thresholds: Thresholds) -> list[str]:
    """Endpoints beyond their limits, and nonfinite steps whatever the baseline has."""
    alarms = []
    for limit in endpoint_limits(thresholds, base.metrics.keys() & method.metrics.keys(), comparison.steps):
        before, after = base.metrics[limit.key].mean, method.metrics[limit.key].mean
        if limit.key not in NONFINITE and limit.passed(before, after):
            alarms.append(f"{method.label}: {limit.sentence(before, after)}")
    return alarms + [f"{method.label}: {key} = {rate:.3g}" for key in NONFINITE if (rate := method.mean(key))]


def quality_gate(comparisons: Sequence[Comparison], thresholds: Thresholds) -> Decision:
    """The largest rise of CE and PPL over the matched baseline of each comparison, against the stated tolerance."""
    found = [
        (evaluated, stated, verdict)
        for comparison in comparisons
        for evaluated in [evaluated_comparison(comparison, thresholds)]
        for stated, verdict in zip(comparison.quality.methods, evaluated.quality.methods, strict=True)
    ]
    if not found:
        return QUALITY.unevaluated("the comparison states no PPL difference" if comparisons else NO_COMPARISON)
    # A method without a partner of its seed has neither number nor verdict.
    compared = [each for each in found if each[2].delta_ppl is not None or each[2].accepted is not None]
    if not compared:
        return QUALITY.unevaluated("no method of the comparison shares a seed with the baseline")
    accepted, rejected, effects = list[str](), list[str](), list[Effect]()
    rises = list[float]()  # of PPL, as a share of the baseline's: two comparisons have different baselines
    for comparison, stated, verdict in compared:
        if quality_accepted(stated, verdict, comparison.quality.tolerance_ppl):
            accepted.append(verdict.label)
        else:
            rejected.append(_with_reason(verdict))
        base, rise = comparison.baseline_method, verdict.delta_ppl
        ppl = None if base is None else base.mean("ppl")
        rises.append(-math.inf if rise is None else rise / ppl if ppl else rise)
        if base is not None and ppl is not None and rise:
            note = f"{base.label} → {verdict.label}"
            effects.append(Effect("PPL", ppl, ppl + rise, note=note))
            effects += [
                Effect("CE", base.mean("ce"), method.mean("ce"), unit="nats", note=note)
                for method in comparison.methods
                if (method.method, method.coef) == (verdict.method, verdict.coef)
            ]
    comparison, _, worst = compared[rises.index(max(rises))]
    tolerance, rise, parts = comparison.quality.tolerance_ppl, worst.delta_ppl, list[str]()
    if rise is not None:
        part = None if worst.parts is None else worst.parts.quality
        nats = None if part is None else part.numbers.get("delta_ce")
        in_nats = f" ({nats:+.4g} nat)" if isinstance(nats, float) else ""
        held = f" (tolerance {tolerance:.3g} PPL)" if tolerance is not None else ""
        parts.append(f"the largest PPL change is {rise:+.4g}{in_nats}, {worst.label}{held}")
    parts.append(f"rejected: {', '.join(rejected)}" if rejected else "no method is rejected for its quality")
    if rejected and accepted:
        parts.append(f"within the tolerance: {', '.join(accepted)}")
    return QUALITY.decision(rise, tolerance, bool(rejected), sentence(*parts), effects)


def _with_reason(verdict: Verdict) -> str:
    part = None if verdict.parts is None else verdict.parts.quality
    why = part.reason.rstrip(".") if part is not None and part.state == "fails" else ""
    why = why or ("" if verdict.parts is not None else verdict.reason)
    return f"{verdict.label} ({why})" if why else verdict.label
