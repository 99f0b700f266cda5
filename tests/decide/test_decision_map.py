"""The decision map: verdicts from numbers, effects that a straight computation confirms."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import straight_audit
from zloss.decide.decision_map import decide, with_decisions
from zloss.decide.stages import STAGES, lambda_budget
from zloss.decide.thresholds import WHY, Thresholds
from zloss.errors import InputError
from zloss.results.audit import AuditReport, HeadNumbers, Heads
from zloss.results.comparison import Comparison, Quality
from zloss.results.decision import Decision
from zloss.results.loss_audit import LossAudit

CHECKPOINT, TRAINING = [stage.name for stage in STAGES[:4]], [stage.name for stage in STAGES[4:]]


def by_name(decisions: tuple[Decision, ...]) -> dict[str, Decision]:
    return {decision.stage: decision for decision in decisions}


def test_an_audit_evaluates_four_stages_and_names_the_command_for_the_others(
    report: AuditReport, loss_audit: LossAudit, comparison: Comparison
) -> None:
    decisions = by_name(report.decisions)
    assert list(decisions) == CHECKPOINT + TRAINING
    assert all(decisions[name].fired is not None for name in CHECKPOINT)
    for name, command in zip(TRAINING, ("audit-loss", "router-scale", "compare", "compare"), strict=True):
        assert decisions[name].fired is None
        assert decisions[name].value is None
        assert f"zloss {command}" in decisions[name].reason
    joined = decide(report, loss_audits=[loss_audit], comparisons=[comparison])
    assert all(decision.fired is not None for decision in joined)


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
    paths, r_z = report.tied_paths.raw, report.gradient.raw.r_z
    one, other = paths.output_norm, paths.input_norm
    of_both = (one**2 + other**2 + 2 * one * other * paths.cosine) ** 0.5
    return max(one, other) * r_z / of_both * coef / report.gradient.coef


@pytest.mark.parametrize("smaller", [1, 100])
def test_a_shared_pathway_of_a_negligible_gradient_is_quiet(report: AuditReport, smaller: float) -> None:
    """A tied model with random weights fired although its Z gradient was 3e-7 of the CE gradient.

    Whether a gradient is negligible does not depend on the coefficient of the audit, which is `smaller` times as small.
    """
    raw = replace(report.gradient.raw, r_z=report.gradient.raw.r_z / smaller)
    audit = replace(report, gradient=replace(report.gradient, coef=report.gradient.coef / smaller, raw=raw))
    for factor, fired in ((0.999, True), (1.001, False)):
        limits = Thresholds(negligible_r_z=factor * larger_path(report))
        decision = by_name(decide(audit, thresholds=limits))["Shared pathway"]
        assert decision.fired is fired
        assert ("so neither matters" in decision.reason) is not fired


def test_two_large_paths_that_cancel_are_not_negligible(report: AuditReport) -> None:
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
    assert r_z_at(budget.raw, monkeypatch, centered=False) == pytest.approx(budget.r_z, rel=1e-9)
    assert r_z_at(budget.centered, monkeypatch, centered=True) == pytest.approx(budget.r_z, rel=1e-9)
    # The oracle can fail: neither the other coordinate's λ nor its inverse meets it.
    assert r_z_at(budget.centered, monkeypatch, centered=False) != pytest.approx(budget.r_z, rel=1e-2)
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
    assert effects["R_Z of the head"].after == report.gradient.centered.r_z


def test_the_shared_table_receives_the_sum_of_both_paths(report: AuditReport) -> None:
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
    assert "rejected: CE" in gate.reason
    rise = gate.value
    lenient = replace(worse, quality=replace(worse.quality, tolerance_ppl=rise * 1.01))
    assert by_name(decide(None, comparisons=[lenient]))["Quality gate"].fired is False
    # A verdict stated by the comparison, which also weighs the diagnosed quantity, goes before ours.
    accepted = tuple(replace(verdict, accepted=True) for verdict in worse.quality.methods)
    stated = replace(worse, quality=Quality(methods=accepted))
    assert by_name(decide(None, comparisons=[stated]))["Quality gate"].fired is False


def test_a_comparison_that_says_little_leaves_stages_open() -> None:
    empty = Comparison(baseline="ce", seeds=(), methods=(), quality=Quality())
    decisions = by_name(decide(None, comparisons=[empty]))
    assert decisions["Quality gate"].fired is None
    assert "zloss compare" in decisions["Quality gate"].reason
    assert decisions["Optimizer consequence"].fired is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_number_is_never_within_its_threshold(bare: AuditReport, value: float) -> None:
    broken = replace(bare, heads=Heads(replace(bare.heads.raw, mu_abs_99=value, a_p_99=value), bare.heads.centered))
    decisions = by_name(decide(broken))
    for name in ("Source coordinate", "Architectural transport"):
        assert decisions[name].fired is None
        assert str(value) in decisions[name].reason


def test_a_report_keeps_the_thresholds_it_was_decided_with(bare: AuditReport) -> None:
    with pytest.raises(InputError, match="gain_99"):
        Thresholds(gain_99=math.nan)
    strict = with_decisions(bare, thresholds=Thresholds(gain_99=bare.heads.raw.a_p_99 * 2, r_z_budget=0.2))
    assert strict.lambda_budget.r_z == 0.2
    assert {stage.threshold_name for stage in STAGES} <= set(strict.thresholds)
    again = AuditReport.from_dict(strict.to_dict())
    assert decide(again) == strict.decisions
    assert with_decisions(again).thresholds == strict.thresholds
    assert with_decisions(again, thresholds=Thresholds()).decisions == with_decisions(bare).decisions
    assert with_decisions(replace(bare, thresholds={"of a later version": 3.0})).thresholds == Thresholds().to_dict()


def test_every_threshold_has_its_reason_and_the_guide_states_its_default() -> None:
    assert WHY.keys() == Thresholds().to_dict().keys()
    assert all(WHY.values())
    guide = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", guide, flags=re.MULTILINE))
    assert {name: float(value) for name, value in stated.items()} == Thresholds().to_dict()
    assert all(stage.name in guide for stage in STAGES)
