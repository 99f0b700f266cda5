"""Stages of the decision map one by one: comparisons of runs, implementation audits, routers; remedies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import straight_audit
from tests.laws.example_results import ROUTERS, implementation_example
from zloss.cli.main import command_type
from zloss.cli.options import flags_of
from zloss.decide.answer import ordered_stages
from zloss.decide.decision_map import decide
from zloss.decide.stages import STAGES, Stage, remedies_for
from zloss.decide.thresholds import Thresholds
from zloss.results.audit import AuditReport
from zloss.results.comparison import (
    ComparedMethod,
    Comparison,
    Quality,
    RouterVariant,
    RouterVariants,
    SeedSummary,
    Verdict,
)
from zloss.results.decision import Decision
from zloss.results.implementation_audit import Fp16Headroom, ImplementationAudit, StoredLogits, UpdateErrors
from zloss.results.loss_audit import Finding, LossAudit, SourceError
from zloss.results.router import MeasuredScale
from zloss.router.conventions import router_scale, router_scale_table

IMPLEMENTATION, ROUTER = "Implementation", "Router reduction"
OPTIMIZER, QUALITY_GATE = "Optimizer consequence", "Quality gate"


def stage(decisions: tuple[Decision, ...], name: str) -> Decision:
    return next(decision for decision in decisions if decision.stage == name)


def hand_written(base: dict[str, float], run: dict[str, float], delta_ppl: float | None = None) -> Comparison:
    """As a file without parts, seeds and tolerance is read."""
    metrics = [{key: SeedSummary(value, None, 1) for key, value in numbers.items()} for numbers in (base, run)]
    methods = (ComparedMethod("ce", 0.0, metrics=metrics[0]), ComparedMethod("standard", 1e-3, metrics=metrics[1]))
    quality = Quality(methods=(Verdict("standard", 1e-3, delta_ppl, accepted=None),))
    return Comparison(baseline="ce", seeds=(), methods=methods, quality=quality)


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("adam_v_max", 0.02, 20.0),
        ("spike_rate", 0.0, 0.5),
        ("phi_50", 0.0, 0.2),
        ("grad_norm_max", 1.0, 22.0),
        ("grad_norm_p999", 1.0, 5.0),
        ("kappa_min", 10_000.0, 100.0),
        ("nonfinite_microbatch", 0.0, 0.01),
    ],
)
def test_every_endpoint_fires_the_optimizer_stage(key: str, before: float, after: float) -> None:
    calm = {"grad_norm_p99": 1.0, "ppl": 20.0, key: before}
    fired, quiet = (
        stage(decide(None, comparisons=[hand_written(calm, {**calm, key: value})]), OPTIMIZER)
        for value in (after, before)
    )
    assert (fired.fired, quiet.fired, quiet.measured) == (True, False, ())
    assert [effect.quantity for effect in fired.measured] in ([key], [])


def test_a_joined_comparison_is_read_against_its_own_baseline() -> None:
    dense = hand_written({"ppl": 397.5, "ce": 5.985}, {"ppl": 390.0, "ce": 5.966}, delta_ppl=-7.5)
    experts = hand_written({"ppl": 60.55, "ce": 4.1034}, {"ppl": 61.44, "ce": 4.118}, delta_ppl=0.89)
    gate = stage(decide(None, comparisons=[dense, experts]), QUALITY_GATE)
    assert gate.fired is True
    worst = {(e.quantity, e.before): e.after for e in gate.measured}
    assert worst["PPL", 60.55] == pytest.approx(61.44)
    assert worst["PPL", 397.5] == pytest.approx(390.0)
    assert worst["CE", 4.1034] == 4.118
    assert gate.value == 0.89


@pytest.fixture(scope="module")
def exact() -> LossAudit:
    """The audit of a loss without a finding, whose source is exact."""
    tokens, _, _ = straight_audit.run_tiny(straight_audit.tiny_model())
    return replace(LossAudit.from_dict(straight_audit.loss_audit(tokens, torch.float32)), findings=())


def finding(name: str, severity: Any = "error") -> Finding:
    return Finding(name, "finding", "seen", None, severity, remedy=f"repair {name}")


def of_loss(audit: LossAudit, **changes: Any) -> Decision:
    return stage(decide(None, loss_audits=[replace(audit, **changes)]), IMPLEMENTATION)


def test_the_remedy_fits_the_finding(exact: LossAudit) -> None:
    decided = of_loss(exact, findings=(finding("denominator_mismatch"),))
    assert decided.fired is True
    assert decided.action == "Repair denominator_mismatch"
    assert decided.measured == ()  # its source is exact before and after


def test_remedies_are_the_ones_of_the_record_errors_first_and_each_once() -> None:
    first, second = finding("overwrites_input", "warning"), finding("zero_gradient_z")
    third = replace(finding("overflow"), remedy=second.remedy)
    assert remedies_for([first, second, third]) == "Repair zero_gradient_z; repair overwrites_input"
    assert remedies_for([]) == ""


def test_an_error_of_stored_precision_without_a_finding_keeps_fp32(exact: LossAudit) -> None:
    fired = of_loss(exact, source=replace(exact.source, delta_src=0.5))
    assert fired.fired is True
    assert fired.action.startswith("Keep the logits in fp32")


def test_only_errors_of_a_loss_audit_fire_the_implementation_stage(exact: LossAudit) -> None:
    """A warning that does not concern the trained gradient used to fire it."""
    mild = (finding("overwrites_input", "warning"), finding("all_ignored_nonfinite", "note"))
    quiet = of_loss(exact, findings=mild)
    assert quiet.fired is False
    assert "no errors; warnings and notes: overwrites_input, all_ignored_nonfinite" in quiet.reason
    fired = of_loss(exact, findings=(*mild, finding("counted_twice")))
    assert fired.fired is True
    assert "errors: counted_twice; warnings and notes: overwrites" in fired.reason
    assert fired.action == "Repair counted_twice"
    unread = SourceError(None, None, None, reason="not repeatable")
    assert of_loss(exact, findings=mild, source=unread).fired is None


def test_fired_stages_are_ordered_by_what_rests_on_them(report: AuditReport, exact: LossAudit) -> None:
    """What to do about them: `tests/decide/test_consequences.py`."""
    wrong = replace(exact, findings=(finding("counted_twice"),))
    fired = decide(report, loss_audits=[wrong], thresholds=Thresholds(shift_over_log_v=0, gain_99=0))
    order = ordered_stages(fired)
    assert order[0] == "Implementation"
    assert order.index("Source coordinate") < order.index("Architectural transport")


def test_decomposition_is_quiet_where_both_parts_are_negligible(bare: AuditReport) -> None:
    small = replace(
        bare,
        heads=replace(
            bare.heads,
            raw=replace(bare.heads.raw, mu_rms=0.3),
            centered=replace(bare.heads.centered, diag_z=bare.diag_coef * 0.09),
        ),
    )
    quiet = stage(decide(small), "Objective decomposition")
    assert quiet.value == pytest.approx(0.5)
    assert quiet.fired is False
    assert quiet.reason == "Neither part matters: rms μ = 0.3 and rms(log Z̃ − c) = 0.3 nats, both below 1."
    assert stage(decide(small, thresholds=Thresholds(negligible_rms=0.1)), "Objective decomposition").fired is True
    shifted = replace(small, heads=replace(small.heads, raw=replace(small.heads.raw, mu_rms=30.0)))
    assert stage(decide(shifted), "Objective decomposition").reason.startswith("μ dominates: E μ² = 900, ")


@pytest.fixture
def audit(report: AuditReport) -> ImplementationAudit:
    return implementation_example(report)


def stored(storage: str, delta_src: float, *, scale: float = 1.0) -> StoredLogits:
    return StoredLogits(storage, scale, 96, 1e-4, delta_src, delta_src, delta_src, 1.0)


def update(storage: str, error: float, *, scale: float = 1.0) -> UpdateErrors:
    return UpdateErrors(storage, scale, "z", "head", 96, error, 1.0, error, 1.0)


BF16, FP16 = stored("bf16", 0.03), stored("fp16", 0.004)


@pytest.mark.parametrize(
    ("source", "updates", "limits", "fired", "value", "said"),
    [
        ((BF16, FP16), (), {}, True, 0.03, "stored in bf16) exceeds 0.01; within it: logits of tiny-tied stored in fp16"),
        ((FP16,), (), {}, False, 0.004, ""),
        ((FP16,), (), {"delta_src": 0.003}, True, 0.004, ""),
        ((FP16,), (update("bf16", 0.02), update("bf16", 0.001)), {}, True, 0.004,
         "Δ_θ = 0.02 (bf16 logits, Z gradient of the head) exceeds 0.01"),
        ((FP16,), (update("bf16", 0.02),), {"delta_theta": 0.05}, False, 0.004, ""),
        ((), (update("bf16", 0.02),), {}, True, 0.02, ""),
        # Larger logits than the model's own are not evaluated.
        ((FP16, stored("bf16", 0.5, scale=4.0)), (update("bf16", 0.5, scale=4.0),), {}, False, 0.004, ""),
        ((), (), {}, None, None, "zloss audit-implementation"),
    ],
)  # fmt: skip
def test_errors_of_stored_logits_and_of_the_update_fire_it(
    audit: ImplementationAudit, source: Any, updates: Any, limits: Any, fired: bool | None, value: Any, said: str
) -> None:
    given = replace(audit, source=source, updates=updates, overflow=())
    decisions = decide(None, implementation_audits=[given], thresholds=Thresholds(**limits))
    found = stage(decisions, IMPLEMENTATION)
    assert (found.fired, found.value) == (fired, value)
    assert said in found.reason
    assert "findings" not in found.reason  # no loss was audited
    assert ("fp32" in found.action) is (fired is True)
    assert stage(decisions, OPTIMIZER).fired is None


def rooms(ce: float, standard: float) -> tuple[Fp16Headroom, ...]:
    return (Fp16Headroom("ce", 0.0, 2, 1.0, 1.0, ce), Fp16Headroom("standard", 1e-3, 2, 1.0, 1.0, standard))


def margin(audit: ImplementationAudit, kappa: tuple[float, float], *runs: Comparison, **limits: float) -> Decision:
    """The optimizer stage where κ_min is `kappa` under CE and under standard Z-loss."""
    given = replace(audit, overflow=rooms(*kappa))
    return stage(
        decide(None, implementation_audits=[given], comparisons=runs, thresholds=Thresholds(**limits)), OPTIMIZER
    )


def test_the_papers_overflow_numbers_fire_the_optimizer_stage(audit: ImplementationAudit) -> None:
    """tab:overflow_audit, GPT-2: κ_min 6718 of CE falls to 731 under standard Z-loss."""
    fired = margin(audit, (6718, 731))
    assert fired.fired is True
    assert "Standard, λ 0.001 on tiny-tied: largest safe fp16 scale κ 6.72e+03 → 731 (limit ÷ 3)" in fired.reason
    assert fired.value == pytest.approx(6718 / 731)
    assert [(effect.before, effect.after) for effect in fired.measured] == [(6718, 731)]
    assert margin(audit, (6718, 731), fp16_margin_ratio=10).fired is None
    assert margin(audit, (7606, 0.0)).fired is True  # a gradient that is not finite


def test_a_margin_within_its_limit_does_not_speak_for_training(
    audit: ImplementationAudit, comparison: Comparison
) -> None:
    unknown = margin(audit, (7606, 6983))
    assert unknown.fired is None
    assert "6.98e+03" in unknown.reason
    # With compared runs the stage is decided by them, and the margin is named.
    runs = replace(comparison, methods=tuple(m for m in comparison.methods if m.method != "heavy"))
    quiet, loud = (margin(audit, (7606, after), runs, grad_tail_ratio=1e9) for after in (6983, 69))
    assert (quiet.fired, loud.fired) == (False, True)
    assert "6.98e+03" in quiet.reason
    assert "kappa_min" in [effect.quantity for effect in loud.measured]


@pytest.mark.parametrize("found", STAGES, ids=lambda found: found.name)
def test_every_hint_names_a_command_with_the_options_it_has(found: Stage) -> None:
    assert found.commands
    for command in found.commands:
        program, word, *options = command.split()
        assert program == "zloss"
        known = flags_of(command_type(word)).values()
        assert {option for option in options if option.startswith("--")} <= set(known)


def measured(relative: float) -> MeasuredScale:
    return MeasuredScale(1e-3, 0.0, (1.0,), relative, relative, (relative,), None, 0.0)


def test_router_scales_come_from_the_audit_or_the_comparison(report: AuditReport, comparison: Comparison) -> None:
    scale = router_scale("active_route_mean", layers=4, tokens=64, top_k=4, coef=1e-3)
    variant = RouterVariant("active_route_mean", 1e-3, s_rel=scale.relative)
    for decisions in (
        decide(replace(report, router=replace(ROUTERS, applied=measured(scale.relative)))),
        decide(report, comparisons=[replace(comparison, router=RouterVariants("ce", (variant,)))]),
    ):
        router = stage(decisions, ROUTER)
        assert router.fired is True
        assert router.value == scale.relative
        # λ_R / s_rel under this convention has the strength of λ_R under the token-layer mean.
        matched = router_scale("active_route_mean", layers=4, tokens=64, top_k=4, coef=router.measured[0].after)
        reference = router_scale("token_layer_mean", layers=4, tokens=64, top_k=4, coef=1e-3)
        assert matched.absolute == pytest.approx(reference.absolute)
    quiet = stage(decide(replace(report, router=replace(ROUTERS, applied=measured(1.0)))), ROUTER)
    assert quiet.fired is False
    # The convention an audit diagnoses with is ours: without a measured loss nothing is known of the model's.
    unknown = stage(decide(replace(report, router=replace(ROUTERS, applied=None))), ROUTER)
    assert unknown.fired is None


STATED = router_scale_table(1e-3, "active_route_mean", layers=4, top_k=4, tokens=64)


def test_the_router_scale_of_another_model_passed_for_that_of_the_audited_one(
    report: AuditReport, comparison: Comparison
) -> None:
    variant = RouterVariant("active_route_mean", 1e-3, s_rel=4.0)
    runs = replace(comparison, model="experts", router=RouterVariants("ce", (variant,)))
    for decisions, source in (
        (decide(report, routers=[STATED]), "the coefficient that was stated to `zloss router-scale`"),
        (decide(report, routers=[measured(4.0)]), "a router loss that was measured by itself"),
        (decide(report, comparisons=[runs]), "the compared runs of experts"),
    ):
        found = stage(decisions, ROUTER)
        assert found.fired is True
        assert found.reason.endswith(f". The audited model has no router; this comes from {source}.")
        assert found.action.startswith("In the model that has the router, match the coefficient")
    # Alone it is of no audited model.
    dense = stage(decide(report), ROUTER)
    assert (dense.fired, dense.reason) == (
        None,
        "Not applicable: the audited model has no router. For a model that has one: `zloss router-scale --out DIR`.",
    )
    alone = stage(decide(None, routers=[STATED]), ROUTER)
    assert "audited model" not in alone.reason
    assert alone.action == "Match the coefficient so that s_rel = 1"


def test_an_audit_that_left_the_routers_out_does_not_say_that_there_are_none(report: AuditReport) -> None:
    for unknown in (replace(report, status="partial"), replace(report, reasons={"router": "left out"})):
        for decisions in (decide(unknown), decide(unknown, routers=[STATED])):
            assert "has no router" not in stage(decisions, ROUTER).reason
