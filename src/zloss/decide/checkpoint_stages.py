"""Stages an audit of a checkpoint evaluates by itself: source, decomposition, transport, shared pathway."""

from __future__ import annotations

import math

from zloss.decide.budget import USUAL, budget_effects
from zloss.decide.stage_outcome import StageOutcome, unevaluated, without_verdict
from zloss.decide.stages import DECOMPOSITION, PATHWAY, SOURCE, TRANSPORT, Stage
from zloss.decide.thresholds import Thresholds
from zloss.results.audit import NOT_MEASURED, AuditReport
from zloss.results.decision import Effect
from zloss.results.gradient_numbers import NO_INPUT_PATH, GradientInfo


def source_coordinate(report: AuditReport, thresholds: Thresholds) -> StageOutcome:
    """p99 |μ| against a multiple of log V."""
    value = report.heads.raw.mu_abs_99
    if value is None:
        return _missing(SOURCE, report, "heads.raw.mu_abs_99")
    log_v = math.log(report.model.valid_vocab or report.model.vocab)
    limit = thresholds.shift_over_log_v * log_v
    fired = value > limit
    verb = "exceeds" if fired else "stays within"
    reason = f"p99 |μ| = {value:.4g} {verb} {thresholds.shift_over_log_v:g} · log V = {limit:.4g}."
    return StageOutcome(value, limit, fired, reason, _centering(report) + budget_effects(report, thresholds.r_z_budget))


def _missing(stage: Stage, report: AuditReport, path: str) -> StageOutcome:
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


def objective_decomposition(report: AuditReport, thresholds: Thresholds) -> StageOutcome:
    """Share of the smaller of E μ² and E(log Z̃ − c)² in their sum; quiet where both are negligible."""
    raw, centered, coef = report.heads.raw, report.heads.centered, report.diag_coef
    if raw.mu_rms is None or centered.diag_z is None:
        path = "heads.raw.mu_rms" if raw.mu_rms is None else "heads.centered.diag_z"
        return _missing(DECOMPOSITION, report, path)
    shift, relative = raw.mu_rms**2, centered.diag_z / coef
    total = shift + relative
    if total == 0:
        return StageOutcome(0.0, thresholds.component_share, False, "Neither μ nor log Z̃ − c ever leaves its target.")
    share = min(shift, relative) / total
    floor = thresholds.negligible_rms
    if max(shift, relative) < floor**2:
        sizes = f"rms μ = {math.sqrt(shift):.3g} and rms(log Z̃ − c) = {math.sqrt(relative):.3g} nats"
        reason = f"Neither part matters: {sizes}, both below {floor:g}."
        return StageOutcome(share, thresholds.component_share, False, reason)
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
    return StageOutcome(
        share, thresholds.component_share, fired, reason, effects + budget_effects(report, thresholds.r_z_budget)
    )


def architectural_transport(report: AuditReport, thresholds: Thresholds) -> StageOutcome:
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
    return StageOutcome(raw.a_p_99, thresholds.gain_99, fired, reason, effects)


def shared_pathway(report: AuditReport, thresholds: Thresholds) -> StageOutcome:
    """‖input path‖ / ‖output path‖ of the Z gradient on a tied table; quiet where both are negligible beside CE's.

    An untied head has no input path.
    """
    limit = thresholds.input_path_ratio
    if not report.model.tied:
        return StageOutcome(None, limit, False, f"{NO_INPUT_PATH[0].upper()}{NO_INPUT_PATH[1:]}.")
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
        larger = _beside_ce(report.gradient, max(paths.output_norm, paths.input_norm), both)
        if fired and larger is not None and larger < thresholds.negligible_r_z:
            fired = False
            share = f"{larger:.2g} of the CE gradient at λ = {USUAL[1]:g} (below {thresholds.negligible_r_z:g})"
            reason += f", but the larger path is {share}, so neither matters"
    return StageOutcome(ratio, limit, fired, reason + ".", effects + budget_effects(report, thresholds.r_z_budget))


def _beside_ce(gradient: GradientInfo | None, path: float, both: float) -> float | None:
    """The norm of one path over that of the CE gradient, at the end of the usual range of λ; None where it is not known.

    R_Z is that of the sum of both paths, in which they may cancel; Z gradients are linear in λ.
    """
    if gradient is None or gradient.raw.r_z is None or gradient.coef == 0 or both == 0:
        return None
    return gradient.raw.r_z * path / both * USUAL[1] / gradient.coef
