"""The decision map: verdicts from numbers, effects that a straight computation confirms."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import straight_audit
from zloss.decide.decision_map import decide, with_decisions
from zloss.decide.stages import STAGES, lambda_budget
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError
from zloss.results.audit import AuditReport, HeadNumbers, Heads
from zloss.results.comparison import Comparison, Quality, RouterVariant, RouterVariants
from zloss.results.decision import Decision
from zloss.results.loss_audit import Finding, LossAudit
from zloss.results.router import MeasuredScale, RouterFindings

CHECKPOINT, TRAINING = [stage.name for stage in STAGES[:4]], [stage.name for stage in STAGES[4:]]


def by_name(decisions: tuple[Decision, ...]) -> dict[str, Decision]:
    return {decision.stage: decision for decision in decisions}


def test_an_audit_evaluates_four_stages_and_names_the_command_for_the_others(report: AuditReport) -> None:
    decisions = by_name(report.decisions)
    assert list(decisions) == CHECKPOINT + TRAINING
    assert all(decisions[name].fired is not None for name in CHECKPOINT)
    for name, command in zip(TRAINING, ("audit-loss", "router-scale", "compare", "compare"), strict=True):
        assert decisions[name].fired is None
        assert decisions[name].value is None
        assert f"zloss {command}" in decisions[name].reason


def test_audit_loss_audit_and_comparison_fill_all_eight(
    report: AuditReport, loss_audit: LossAudit, comparison: Comparison
) -> None:
    decisions = decide(report, loss_audits=[loss_audit], comparisons=[comparison])
    assert len(decisions) == 8
    assert all(decision.fired is not None for decision in decisions)
    assert decisions[-1].stage == "Quality gate"


@pytest.mark.parametrize(
    ("stage", "threshold", "value"),
    [
        ("Source coordinate", "shift_over_log_v", lambda r: r.mu_abs_99 / math.log(r.model.vocab)),
        ("Architectural transport", "gain_99", lambda r: r.heads.raw.a_p_99),
        ("Shared pathway", "input_path_ratio", lambda r: r.tied_paths.raw.input_norm / r.tied_paths.raw.output_norm),
        ("Objective decomposition", "component_share", lambda r: by_name(r.decisions)["Objective decomposition"].value),
    ],
)
def test_a_trigger_fires_just_below_its_value_and_not_just_above(
    report: AuditReport, stage: str, threshold: str, value: Any
) -> None:
    at = value(report)
    for factor, fired in ((0.999, True), (1.001, False)):
        decision = by_name(decide(report, thresholds=Thresholds(**{threshold: at * factor})))[stage]
        assert decision.fired is fired
        assert bool(decision.measured) is fired
        assert decision.threshold_name == threshold


def larger_path(report: AuditReport, coef: float = 1e-3) -> float:
    """The larger path of the Z gradient over the CE gradient at `coef`, from the norms and the cosine of the paths."""
    assert report.gradient is not None
    assert report.tied_paths is not None
    paths, r_z = report.tied_paths.raw, report.gradient.raw.r_z
    assert paths.output_norm is not None
    assert paths.input_norm is not None
    assert paths.cosine is not None
    assert r_z is not None
    one, other = paths.output_norm, paths.input_norm
    of_both = (one**2 + other**2 + 2 * one * other * paths.cosine) ** 0.5
    return max(one, other) * r_z / of_both * coef / report.gradient.coef


def test_a_shared_pathway_of_a_negligible_gradient_is_quiet(report: AuditReport) -> None:
    """A tied model with random weights fired although its Z gradient was 3e-7 of the CE gradient."""
    for factor, fired in ((0.999, True), (1.001, False)):
        limits = Thresholds(negligible_r_z=factor * larger_path(report))
        decision = by_name(decide(report, thresholds=limits))["Shared pathway"]
        assert decision.fired is fired
        assert ("so neither matters" in decision.reason) is not fired


def test_whether_a_shared_pathway_is_negligible_does_not_depend_on_the_coefficient_of_the_audit(
    report: AuditReport,
) -> None:
    assert report.gradient is not None
    r_z = report.gradient.raw.r_z
    assert r_z is not None
    smaller = replace(
        report,
        gradient=replace(
            report.gradient, coef=report.gradient.coef / 100, raw=replace(report.gradient.raw, r_z=r_z / 100)
        ),
    )
    for factor, fired in ((0.999, True), (1.001, False)):
        limits = Thresholds(negligible_r_z=factor * larger_path(report))
        assert by_name(decide(smaller, thresholds=limits))["Shared pathway"].fired is fired


def test_two_large_paths_that_cancel_are_not_negligible(report: AuditReport) -> None:
    assert report.gradient is not None
    assert report.tied_paths is not None
    paths = replace(report.tied_paths.raw, output_norm=0.02, input_norm=0.02, cosine=-0.9995)
    # ‖g_CE‖ = 1, so each path is 0.02 of it at the λ of the audit, and their sum 0.00063.
    r_z = 0.02 * (2 - 2 * 0.9995) ** 0.5
    cancelling = replace(
        report,
        tied_paths=replace(report.tied_paths, raw=paths),
        gradient=replace(report.gradient, coef=1e-3, raw=replace(report.gradient.raw, r_z=r_z)),
    )
    assert r_z < Thresholds().negligible_r_z
    assert by_name(decide(cancelling))["Shared pathway"].fired is True


def r_z_at(coef: float, monkeypatch: pytest.MonkeyPatch, *, centered: bool) -> float:
    monkeypatch.setattr(straight_audit, "COEF", coef)
    model = straight_audit.tiny_model()
    _, ids_NB, target_NB = straight_audit.run_tiny(model)
    gradient, _ = straight_audit.gradients(model, ids_NB[:8], target_NB[:8])
    return float(gradient["centered" if centered else "raw"]["r_z"])


def test_the_solved_coefficient_meets_the_budget_when_measured_again(
    report: AuditReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = report.lambda_budget
    assert budget is not None
    assert budget.raw is not None
    assert budget.centered is not None
    assert r_z_at(budget.raw, monkeypatch, centered=False) == pytest.approx(budget.r_z, rel=1e-9)
    assert r_z_at(budget.centered, monkeypatch, centered=True) == pytest.approx(budget.r_z, rel=1e-9)
    # The oracle can fail: neither the other coordinate's λ nor its inverse meets it.
    assert r_z_at(budget.centered, monkeypatch, centered=False) != pytest.approx(budget.r_z, rel=1e-2)
    assert report.gradient is not None
    for r_z in (0.0, None):
        unknown = replace(report, gradient=replace(report.gradient, raw=replace(report.gradient.raw, r_z=r_z)))
        assert lambda_budget(unknown, 0.05) == replace(budget, raw=None)


def test_the_factorized_effect_is_the_factorized_penalty(report: AuditReport) -> None:
    tokens, _, _ = straight_audit.run_tiny(straight_audit.tiny_model())
    z = tokens.hidden_TD @ tokens.weight_VD.T
    mu, c = z.mean(-1), math.log(z.shape[-1])
    log_z = torch.logsumexp(z, -1)
    factorized = straight_audit.COEF * (mu.square() + (log_z - mu - c).square()).mean()
    standard = straight_audit.COEF * (log_z - c).square().mean()
    effect = by_name(report.decisions)["Objective decomposition"].measured[0]
    assert effect.before == pytest.approx(float(standard))
    assert effect.after == pytest.approx(float(factorized))
    assert effect.after != pytest.approx(float(standard), rel=1e-2)


def test_centering_is_reported_from_the_centered_numbers(report: AuditReport) -> None:
    effects = {
        effect.quantity: effect
        for effect in by_name(decide(report, thresholds=Thresholds(shift_over_log_v=0)))["Source coordinate"].measured
    }
    assert effects["P_Z^99.9"].before == report.heads.raw.p_z_999
    assert effects["P_Z^99.9"].after == report.heads.centered.p_z_999
    assert effects["PPL"].ratio == 1
    assert report.gradient is not None
    assert effects["R_Z of the head"].after == report.gradient.centered.r_z


def test_the_shared_table_receives_the_sum_of_both_paths(report: AuditReport) -> None:
    assert report.gradient is not None
    assert report.gradient.raw.r_z is not None
    model = straight_audit.tiny_model()
    _, ids_NB, _target_NB = straight_audit.run_tiny(model)
    table = model.table_VD.clone().requires_grad_()
    z = model.hidden(ids_NB[:8], table) @ table.T
    aux = straight_audit.COEF * (torch.logsumexp(z, -1) - math.log(z.shape[-1])).square().mean()
    (gradient,) = torch.autograd.grad(aux, table)
    effect = by_name(report.decisions)["Shared pathway"].measured[0]
    assert effect.after == pytest.approx(float(gradient.norm()))
    assert effect.before != pytest.approx(float(gradient.norm()), rel=1e-3)


def test_an_untied_head_is_quiet_and_a_capped_one_open(bare: AuditReport) -> None:
    untied = replace(bare, model=replace(bare.model, tied=False), tied_paths=None)
    pathway = by_name(decide(untied))["Shared pathway"]
    assert pathway.fired is False
    assert "untied" in pathway.reason
    raw = replace(bare.heads.raw, mu_abs_99=None, mu_rms=None)
    capped = replace(
        bare, heads=Heads(raw, HeadNumbers()), mu_abs_99=None, reasons={"heads": "softcap is not shift-invariant"}
    )
    decisions = by_name(with_decisions(capped).decisions)
    for name in ("Source coordinate", "Objective decomposition"):
        assert decisions[name].fired is None
        assert "oftcap is not shift-invariant" in decisions[name].reason
        assert "zloss audit" in decisions[name].reason
    assert decisions["Architectural transport"].fired is not None


def test_a_low_precision_loss_fires_and_an_exact_one_does_not(report: AuditReport) -> None:
    tokens, _, _ = straight_audit.run_tiny(straight_audit.tiny_model())
    stored = (torch.bfloat16, torch.float32)
    audits = {storage: LossAudit.from_dict(straight_audit.loss_audit(tokens, storage)) for storage in stored}
    verdicts = {
        storage: by_name(decide(report, loss_audits=[audit]))["Implementation"] for storage, audit in audits.items()
    }
    assert verdicts[torch.bfloat16].fired is True
    assert "low_precision_source" in verdicts[torch.bfloat16].reason
    assert verdicts[torch.float32].fired is False
    both = by_name(decide(None, loss_audits=list(audits.values())))["Implementation"]
    assert both.value == verdicts[torch.bfloat16].value


def test_a_loss_with_a_finding_fires_although_its_source_is_exact(report: AuditReport) -> None:
    tokens, _, _ = straight_audit.run_tiny(straight_audit.tiny_model())
    audit = LossAudit.from_dict(straight_audit.loss_audit(tokens, torch.float32))
    audit = replace(audit, findings=(Finding("counted_twice", "finding", "Z is in the loss twice"),))
    decision = by_name(decide(report, loss_audits=[audit]))["Implementation"]
    assert decision.fired is True
    assert "counted_twice" in decision.reason


def test_training_stages_read_a_real_comparison(comparison: Comparison) -> None:
    decisions = by_name(decide(None, comparisons=[comparison]))
    tails = {method.method: method.metrics["grad_norm_p99"].mean for method in comparison.methods}
    optimizer = decisions["Optimizer consequence"]
    assert optimizer.value == pytest.approx(max(tails["standard"], tails["heavy"]) / tails["ce"])
    assert optimizer.fired is True
    assert "heavy" in optimizer.reason
    assert "Φ_10" in optimizer.reason
    quality = decisions["Quality gate"]
    assert quality.fired is False
    assert quality.value == max(verdict.delta_ppl or 0.0 for verdict in comparison.quality.methods)
    assert decisions["Router reduction"].fired is False
    assert all(decisions[name].fired is None for name in CHECKPOINT)


def test_the_quality_gate_rejects_a_rise_of_perplexity_beyond_the_tolerance() -> None:
    worse = Comparison.from_dict(straight_audit.comparison({"heavy": 1.0, "ce": 0.0}))
    gate = by_name(decide(None, comparisons=[worse]))["Quality gate"]
    assert gate.fired is True
    assert "rejected: ce" in gate.reason
    rise = gate.value
    assert rise is not None
    lenient = replace(worse, quality=replace(worse.quality, tolerance_ppl=rise * 1.01))
    assert by_name(decide(None, comparisons=[lenient]))["Quality gate"].fired is False
    # A verdict stated by the comparison, which also weighs the diagnosed quantity, goes before ours.
    accepted = tuple(replace(verdict, accepted=True) for verdict in worse.quality.methods)
    stated = replace(worse, quality=Quality(methods=accepted))
    assert by_name(decide(None, comparisons=[stated]))["Quality gate"].fired is False


def routers(applied: MeasuredScale | None) -> RouterFindings:
    """The router section of an audit whose model's own loss was measured as `applied`."""
    return RouterFindings(
        scoring="softmax", softmax_normalizer=True, layers=4, model_layers=4, experts=8, top_k=4, decisions=256,
        nonfinite=0, coef=1e-3, convention="token_layer_mean", target=None, absolute=None, relative=1.0, log_z=None,
        violation=None, entropy=None, load_cv=None, correction_norm=None, per_layer=(), applied=applied, reasons=(),
    )  # fmt: skip


def measured(relative: float) -> MeasuredScale:
    return MeasuredScale(1e-3, 0.0, (1.0,), relative, relative, (relative,), None, 0.0)


def test_router_scales_come_from_the_audit_or_the_comparison(report: AuditReport, comparison: Comparison) -> None:
    from zloss.router.conventions import router_scale

    scale = router_scale("active_route_mean", layers=4, tokens=64, top_k=4, coef=1e-3)
    variant = RouterVariant("active_route_mean", 1e-3, s_rel=scale.relative)
    for decisions in (
        decide(replace(report, router=routers(measured(scale.relative)))),
        decide(report, comparisons=[replace(comparison, router=RouterVariants("ce", (variant,)))]),
    ):
        router = by_name(decisions)["Router reduction"]
        assert router.fired is True
        assert router.value == scale.relative
        # λ_R / s_rel under this convention has the strength of λ_R under the token-layer mean.
        assert router.measured[0].after is not None
        matched = router_scale("active_route_mean", layers=4, tokens=64, top_k=4, coef=router.measured[0].after)
        reference = router_scale("token_layer_mean", layers=4, tokens=64, top_k=4, coef=1e-3)
        assert matched.absolute == pytest.approx(reference.absolute)
    quiet = by_name(decide(replace(report, router=routers(measured(1.0)))))["Router reduction"]
    assert quiet.fired is False
    # The convention an audit diagnoses with is ours: without a measured loss nothing is known of the model's.
    unknown = by_name(decide(replace(report, router=routers(None))))["Router reduction"]
    assert unknown.fired is None


def test_a_comparison_that_says_little_leaves_stages_open() -> None:
    empty = Comparison(baseline="ce", seeds=(), methods=(), quality=Quality())
    decisions = by_name(decide(None, comparisons=[empty]))
    assert decisions["Quality gate"].fired is None
    assert "zloss compare" in decisions["Quality gate"].reason
    assert decisions["Optimizer consequence"].fired is None


def test_thresholds_are_checked_and_travel_with_the_report(bare: AuditReport) -> None:
    with pytest.raises(InputError, match="gain_99"):
        Thresholds(gain_99=math.nan)
    chosen = Thresholds(gain_99=3.0, r_z_budget=0.2)
    decided = with_decisions(bare, thresholds=chosen)
    assert decided.thresholds["gain_99"] == 3.0
    assert decided.lambda_budget is not None
    assert decided.lambda_budget.r_z == 0.2
    assert set(decided.thresholds) == {field.name for field in fields(Thresholds)}
    assert {stage.threshold_name for stage in STAGES} <= set(decided.thresholds)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_number_is_never_within_its_threshold(bare: AuditReport, value: float) -> None:
    broken = replace(bare, heads=Heads(replace(bare.heads.raw, mu_abs_99=value, a_p_99=value), bare.heads.centered))
    decisions = by_name(decide(broken))
    for name in ("Source coordinate", "Architectural transport"):
        assert decisions[name].fired is None
        assert str(value) in decisions[name].reason


def test_a_report_keeps_the_thresholds_it_was_decided_with(bare: AuditReport) -> None:
    assert bare.heads.raw.a_p_99 is not None
    strict = with_decisions(bare, thresholds=Thresholds(gain_99=bare.heads.raw.a_p_99 * 2))
    again = AuditReport.from_dict(strict.to_dict())
    assert decide(again) == strict.decisions
    assert with_decisions(again).thresholds == strict.thresholds
    assert with_decisions(again, thresholds=Thresholds()).decisions == with_decisions(bare).decisions
    assert with_decisions(replace(bare, thresholds={"of a later version": 3.0})).thresholds == Thresholds().to_dict()


def test_the_guide_states_every_threshold_with_its_default() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", guide, flags=re.MULTILINE))
    assert {name: float(value) for name, value in stated.items()} == Thresholds().to_dict()
    assert all(stage.name in guide for stage in STAGES)
