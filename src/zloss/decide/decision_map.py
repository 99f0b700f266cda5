"""The decision map of the paper, evaluated: one function per stage, in the order of the map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypedDict, Unpack

from zloss.decide.consequences import (
    gain_consequence,
    give_verdict,
    implementation_consequence,
    input_path_consequence,
    normalizer_consequence,
    router_consequence,
    shift_consequence,
)
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
from zloss.results.comparison import Comparison, Verdict, method_label
from zloss.results.decision import Consequence, Decision, Effect
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
    """All eight stages in the order source → transport → optimizer → quality; `fired` is None for one that was not evaluated.

    Each has its consequence for the planned training. Thresholds are those given, else those stored in the report, else the
    defaults.
    """
    limits = thresholds or stored_thresholds(report.thresholds if report else {})
    report = report and report.finite()
    losses, implementations = joined.get("loss_audits", ()), joined.get("implementation_audits", ())
    comparisons, decisions = joined.get("comparisons", ()), list[Decision]()
    unaudited = Consequence("", None, None, "", None, "No audit of a checkpoint was given.")
    for stage, evaluate, weigh in (
        (SOURCE, source_coordinate, shift_consequence),
        (DECOMPOSITION, objective_decomposition, normalizer_consequence),
        (TRANSPORT, architectural_transport, gain_consequence),
        (PATHWAY, shared_pathway, input_path_consequence),
    ):
        if report is None:
            one = replace(stage.unevaluated("no audit of a checkpoint was given"), consequence=unaudited)
        else:
            one = replace(evaluate(report, limits), consequence=weigh(report, limits))
        decisions.append(one)
    applied = implementation_consequence(report, losses, implementations, limits)
    decisions.append(replace(implementation(losses, limits, implementations), consequence=applied))
    router = router_reduction(report, comparisons, limits, joined.get("routers", ()))
    decisions.append(replace(router, consequence=unaudited if report is None else router_consequence(report, limits)))
    for one in (optimizer_consequence(comparisons, limits, implementations), quality_gate(comparisons, limits)):
        why = "Measured on training runs." if one.fired is not None else "No training runs were compared."
        found = Consequence(one.trigger, one.value, one.threshold, "", one.fired, why)
        decisions.append(replace(one, consequence=found))
    return tuple(decisions)


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
    measurable = left_out or why == NOT_MEASURED or report.status == "partial"
    return stage.unevaluated(why) if measurable else stage.impossible(why)


def source_coordinate(report: AuditReport, thresholds: Thresholds) -> Decision:
    """p99 |μ| against a multiple of log V; centering changes the other numbers too, but not PPL."""
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
        sizes = f"E μ² = {shift:.4g} and E(log Z̃ − c)² = {relative:.4g}"
        reason = f"Both parts count: of {sizes} the smaller is {share:.0%} of the sum (threshold {limit:.0%})."
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


KEEP_FP32 = (
    "Keep the logits in fp32 on their way to log Z, and reuse the forward log-sum-exp statistics in the backward pass"
)


def implementation(
    loss_audits: Sequence[LossAudit],
    thresholds: Thresholds,
    implementation_audits: Sequence[ImplementationAudit] = (),
) -> Decision:
    """The largest Δ_src of the audited losses and storage dtypes, the largest Δ_θ of the implementation audits, and the findings
    of the losses' audits."""
    if not loss_audits and not implementation_audits:
        return IMPLEMENTATION.unevaluated("no audit of a loss or of an implementation was given")
    targets = [audit.target_model for audit in loss_audits if audit.target_model is not None]
    # (error, where, error of the forward value); an error that was not measured is None.
    sources = [
        *((audit.source.delta_src, "", audit.source.forward_rel_error) for audit in loss_audits),
        # On a model's own logits a Z far smaller than CE may be lost in the rounding of CE, which is not a fault of the loss.
        *((t.delta_src, f"the loss on {t.model}", t.forward_rel_error) for t in targets if t.beyond_rounding),
        *(
            (line.delta_src, f"logits of {audit.model.name} stored in {line.storage}", line.forward_rel_error)
            for audit in implementation_audits
            for line in audit.own_source
        ),
    ]
    updates = [(error, name, None) for audit in implementation_audits for name, error in audit.update_errors]
    errors_found = [finding for audit in loss_audits for finding in audit.errors]
    found = [finding.id for finding in errors_found]
    lesser = [finding.id for audit in loss_audits for finding in audit.found if finding.severity != "error"]
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
        # With any other finding the two errors are not a before and after: its remedy changes neither of them.
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
        action=remedies_for(errors_found) or KEEP_FP32,
    )


# Router


REPLACE_ROUTER_LOSS = "Replace the penalty by λ_R·α·(log Z_R − c_R)², then measure its scale again"
CORRECT_SIGN = "Correct the sign of the router penalty, then measure its scale again"
MATCH_ELSEWHERE = "In the model that has the router, match the coefficient so that s_rel = 1"
MEASURED_ELSEWHERE = "a router loss that was measured by itself"
STATED_ELSEWHERE = "the coefficient that was stated to `zloss router-scale`"


def router_reduction(
    report: AuditReport | None,
    comparisons: Sequence[Comparison],
    thresholds: Thresholds,
    routers: Sequence[MeasuredScale | RouterScaleTable] = (),
) -> Decision:
    """The s_rel farthest from 1: measured from a router loss, applied in compared runs, or that of a stated convention.

    A measured gradient that no squared log-normalizer explains has no s_rel, and fires on its own; so does a negative scale. A
    measurement that could not tell the penalty has no s_rel either, and does not fire. If the audited model has no
    router, the reason says what the scale belongs to.
    """
    tolerance, router = thresholds.router_scale_tolerance, None if report is None else report.router
    # An audit that left the routers out has a reason for it.
    routerless = (
        report is not None and router is None and report.status == "complete" and report.reason("router") is None
    )
    elsewhere = " The audited model has no router; this comes from {}." if routerless else ""
    # The diagnostic convention of an audit is ours, so only a measured scale is the model's.
    measured = [] if router is None or router.applied is None else [("the model's own router loss", router.applied)]
    measured += [(one.name or "the measured router loss", one) for one in routers if isinstance(one, MeasuredScale)]
    scales, undetermined = list[tuple[str, float, float | None, float, str]](), list[str]()
    for name, one in measured:
        reason = f"{name}: {one.sentence}{elsewhere.format(MEASURED_ELSEWHERE)}"
        if one.verdict in ("not_squared", "squared_mean", "unexplained"):
            return ROUTER.decision(None, tolerance, True, reason, action=REPLACE_ROUTER_LOSS)
        if one.negative_layers:
            return ROUTER.decision(one.relative, tolerance, True, reason, action=CORRECT_SIGN)
        if one.verdict == "undetermined":
            undetermined.append(reason)
        else:
            scales.append((name, one.relative, one.coef, max(tolerance, one.limit), MEASURED_ELSEWHERE))
    for table in routers:
        if isinstance(table, RouterScaleTable):
            scale = table.scale(table.source).relative
            scales.append((f"{table.source} (stated)", scale, table.coef, tolerance, STATED_ELSEWHERE))
    for runs in comparisons:
        source = "the compared runs" if runs.model is None else f"the compared runs of {runs.model}"
        variants = () if runs.router is None else runs.router.conventions
        scales += [(v.convention, v.s_rel, v.coef, tolerance, source) for v in variants if v.s_rel is not None]
    if not scales:
        if undetermined:
            return ROUTER.decision(None, tolerance, None, " ".join(undetermined))
        if comparisons and router is None:
            reason = "The compared runs have no router, so there is no reduction to match."
            return ROUTER.decision(None, tolerance, False, reason)
        if router is not None:
            return ROUTER.unevaluated("a checkpoint does not show how its router loss was reduced")
        if routerless:
            return ROUTER.inapplicable("the audited model has no router", needed="one")
        return ROUTER.unevaluated("no router was audited, and none of the compared runs has one")
    name, scale, coef, limit, source = max(scales, key=lambda each: abs(each[1] - 1) - each[3])
    fired = abs(scale - 1) > limit
    reason = (
        f"s_rel = {scale:.4g} under {name}: {'not ' if fired else ''}the scale of the token-layer mean (± {limit:.2g})."
    )
    matched = None if coef is None or scale == 0 else coef / scale
    effect = Effect("λ_R that gives s_rel = 1", coef, matched, unit="λ", note=f"under {name}")
    action = MATCH_ELSEWHERE if routerless else ""
    return ROUTER.decision(scale, limit, fired, reason + elsewhere.format(source), [effect], action)


# Training runs


NO_COMPARISON = "no comparison of training runs was given"
TAILS = ("grad_norm_p99", "grad_norm_max")


class _Endpoint(NamedTuple):
    """One optimizer-facing endpoint of a method next to that of its baseline."""

    limit: EndpointLimit
    before: float
    after: float
    method: str
    note: str

    @property
    def beyond(self) -> bool:
        """Whether it is beyond its limit; a nonfinite step always is, whatever the baseline's value."""
        nonfinite = self.limit.key.startswith("nonfinite")
        return self.after > 0 if nonfinite else self.limit.passed(self.before, self.after)

    @property
    def excess(self) -> float:
        return self.limit.excess(self.before, self.after)

    def __str__(self) -> str:
        return f"{self.method}: {self.limit.sentence(self.before, self.after)}"


def optimizer_consequence(
    comparisons: Sequence[Comparison],
    thresholds: Thresholds,
    implementation_audits: Sequence[ImplementationAudit] = (),
) -> Decision:
    """Every optimizer-facing endpoint beyond its limit, on means over seeds; the value is the worst gradient tail.

    The fp16 margin of an implementation audit can fire the stage. On its own it cannot make the stage quiet: it says
    nothing about the gradients of a training run.
    """
    found, tails = list[_Endpoint](), list[_Endpoint]()
    for comparison in comparisons:
        base = comparison.baseline_method
        for method in comparison.methods:
            if base is None or method is base:
                continue
            note, common = f"{base.label} → {method.label}", base.metrics.keys() & method.metrics.keys()
            endpoints = [
                _Endpoint(limit, base.metrics[limit.key].mean, method.metrics[limit.key].mean, method.label, note)
                for limit in endpoint_limits(thresholds, common, comparison.steps)
            ]
            found += endpoints
            # The p99, or over few steps the maximum.
            tails += [one for one in endpoints if one.limit.key in TAILS and one.before][:1]
    margins = _fp16_margins(implementation_audits, thresholds)
    alarms = [one for one in (*found, *margins) if one.beyond]
    worst, narrowest = (max(each, key=lambda one: one.excess, default=None) for each in (tails, margins))
    if worst is None and not alarms:
        why = "the comparison has no gradient tails" if comparisons else NO_COMPARISON
        return OPTIMIZER.unevaluated(why if narrowest is None else f"{narrowest}, which is within its limit, but {why}")
    parts = [] if worst is None else [f"worst gradient tail, of {worst}"]
    parts += [str(one) for one in alarms if one is not worst]
    parts += [] if narrowest is None or narrowest.beyond else [str(narrowest)]
    effects = [Effect(one.limit.key, one.before, one.after, note=one.note) for one in alarms]
    value, limit = None, thresholds.grad_tail_ratio
    if (shown := worst or (None if comparisons else narrowest)) is not None:
        value, limit = shown.excess, shown.limit.limit
    return OPTIMIZER.decision(value, limit, bool(alarms), sentence(*parts), effects)


def _fp16_margins(audits: Sequence[ImplementationAudit], thresholds: Thresholds) -> list[_Endpoint]:
    """κ_min of every method next to that of CE on the same batches, where the audit has both."""
    (limit,), margins = endpoint_limits(thresholds, ("kappa_min",)), list[_Endpoint]()
    for audit in audits:
        base = next((line.kappa_min for line in audit.overflow if line.method == CE), None)
        for line in audit.overflow:
            # A zero gradient has no largest scale, so its margin is infinite and nothing compares with it.
            if base is None or not math.isfinite(base) or line.method == CE or line.kappa_min is None:
                continue
            method = f"{method_label(line.method, line.coef)} on {audit.model.name}"
            margins.append(_Endpoint(limit, base, line.kappa_min, method, f"ce → {method}"))
    return margins


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
