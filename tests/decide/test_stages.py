"""Stages of the decision map one by one: comparisons of runs, implementation audits, routers; remedies and the bottom line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests import straight_audit
from tests.laws.example_results import implementation_example
from zloss.audit.loss.findings import FINDINGS
from zloss.cli.main import COMMANDS
from zloss.cli.options import flags_of
from zloss.decide.answer import bottom_line, decide_results, ordered_actions
from zloss.decide.decision_map import decide, with_decisions
from zloss.decide.stages import REMEDIES, STAGES, remedies_for, usual_range
from zloss.decide.thresholds import Thresholds
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison, RouterVariant, RouterVariants
from zloss.results.decision import Decision
from zloss.results.implementation_audit import Fp16Headroom, ImplementationAudit, StoredLogits, UpdateErrors
from zloss.results.loss_audit import Finding, LossAudit, SourceError
from zloss.results.router import MeasuredScale
from zloss.router.conventions import router_scale_table

IMPLEMENTATION, ROUTER = "Implementation", "Router reduction"
OPTIMIZER, QUALITY = "Optimizer consequence", "Quality gate"


def stage(decisions: tuple[Decision, ...], name: str) -> Decision:
    return next(decision for decision in decisions if decision.stage == name)


def hand_written(base: dict[str, float], run: dict[str, float], **quality: Any) -> Comparison:
    def method(name: str, coef: float, numbers: dict[str, float]) -> dict[str, Any]:
        metrics = {key: {"mean": value, "std": None, "n": 1} for key, value in numbers.items()}
        return {"method": name, "coef": coef, "metrics": metrics}

    return Comparison.from_dict(
        {
            "schema": Comparison.SCHEMA,
            "baseline": "ce",
            "seeds": [],
            "methods": [method("ce", 0.0, base), method("standard", 1e-3, run)],
            "quality": {
                "tolerance_ppl": None,
                "methods": [
                    {"method": "standard", "coef": 1e-3, "delta_ppl": None, "accepted": None, "reason": "", **quality}
                ],
            },
        }
    )


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
    calm = {"grad_norm_p99": 1.0, "ppl": 20.0}
    fired = stage(decide(None, comparisons=[hand_written({**calm, key: before}, {**calm, key: after})]), OPTIMIZER)
    assert fired.fired is True
    assert [effect.quantity for effect in fired.measured] in ([key], [])
    quiet = stage(decide(None, comparisons=[hand_written({**calm, key: before}, {**calm, key: before})]), OPTIMIZER)
    assert quiet.fired is False
    assert quiet.measured == ()


def test_a_joined_comparison_is_read_against_its_own_baseline() -> None:
    dense = hand_written({"ppl": 397.5, "ce": 5.985}, {"ppl": 390.0, "ce": 5.966}, delta_ppl=-7.5)
    experts = hand_written({"ppl": 60.55, "ce": 4.1034}, {"ppl": 61.44, "ce": 4.118}, delta_ppl=0.89)
    gate = stage(decide(None, comparisons=[dense, experts]), QUALITY)
    assert gate.fired is True
    worst = {(e.quantity, e.before): e.after for e in gate.measured}
    assert worst["PPL", 60.55] == pytest.approx(61.44)
    assert worst["PPL", 397.5] == pytest.approx(390.0)
    assert worst["CE", 4.1034] == 4.118
    assert gate.value == 0.89


def audit_with(*ids: str) -> LossAudit:
    tokens, _, _ = straight_audit.run_tiny(straight_audit.tiny_model())
    import torch

    audit = LossAudit.from_dict(straight_audit.loss_audit(tokens, torch.float32))
    return replace(audit, findings=tuple(Finding(name, "finding", "seen") for name in ids))


def test_the_remedy_fits_the_finding() -> None:
    decided = stage(decide(None, loss_audits=[audit_with("denominator_mismatch")]), IMPLEMENTATION)
    assert decided.fired is True
    assert "one token count" in decided.action
    assert "log-sum-exp" not in decided.action
    assert decided.measured == ()  # its source is exact before and after
    both = remedies_for(["reported_z_dtype", "forward_backward_mismatch"])
    assert both.index("log-sum-exp") < both.index("fp32")
    assert remedies_for(["something_new"]) == "Mend something_new"


def test_every_finding_of_a_loss_audit_has_a_remedy() -> None:
    names = set(FINDINGS)
    assert len(names) > 15
    assert names <= REMEDIES.keys()


def test_only_errors_of_a_loss_audit_fire_the_implementation_stage() -> None:
    """A warning that is no fault of the trained gradient used to fire it."""
    mild = (
        Finding("all_ignored_nonfinite", "finding", "seen", None, "warning"),
        Finding("returned_values", "finding", "seen", None, "note"),
    )
    quiet = stage(decide(None, loss_audits=[replace(audit_with(), findings=mild)]), IMPLEMENTATION)
    assert quiet.fired is False
    assert "no errors; warnings and notes: all_ignored_nonfinite, returned_values" in quiet.reason
    grave = Finding("counted_twice", "finding", "seen", None, "error")
    fired = stage(decide(None, loss_audits=[replace(audit_with(), findings=(*mild, grave))]), IMPLEMENTATION)
    assert fired.fired is True
    assert "errors: counted_twice; warnings and notes: all_ignored" in fired.reason
    assert fired.action == remedies_for(["counted_twice"])
    unread = replace(audit_with(), findings=mild, source=SourceError(None, None, None, reason="not repeatable"))
    assert stage(decide(None, loss_audits=[unread]), IMPLEMENTATION).fired is None


def test_implementation_reads_the_error_of_the_update_of_a_linear_loss() -> None:
    """Δ_θ of implementation audits: `test_delta_theta_fires_it_as_well`."""
    exact = audit_with()
    close, far = (replace(exact, source=replace(exact.source, bf16_inputs=error)) for error in (1e-3, 0.02))
    quiet = stage(decide(None, loss_audits=[close]), IMPLEMENTATION)
    assert quiet.fired is False
    assert quiet.action == next(one.action for one in STAGES if one.name == IMPLEMENTATION)
    fired = stage(decide(None, loss_audits=[far]), IMPLEMENTATION)
    assert fired.fired is True
    assert "Δ_θ = 0.02 (dW) exceeds 0.01" in fired.reason


def test_the_bottom_line_names_what_comes_first_and_why(report: AuditReport) -> None:
    fired = decide(
        report, loss_audits=[audit_with("counted_twice")], thresholds=Thresholds(shift_over_log_v=0, gain_99=0)
    )
    order = [decision.stage for decision in ordered_actions(fired)]
    assert order[0] == "Implementation"
    assert order.index("Source coordinate") < order.index("Architectural transport")
    assert bottom_line(fired).startswith("First: add Z once: it is in the loss already (Implementation), because")
    quiet = tuple(replace(decision, fired=False) for decision in fired)
    assert bottom_line(quiet) == "Nothing to do: 8 stages were evaluated and none fired."
    unknown = tuple(replace(decision, fired=None) for decision in fired)
    assert bottom_line(unknown) == "Nothing is decided: no stage was evaluated."


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
    assert "Neither part matters" in quiet.reason
    assert stage(decide(small, thresholds=Thresholds(negligible_rms=0.1)), "Objective decomposition").fired is True


def test_a_solved_coefficient_stands_beside_the_usual_range() -> None:
    assert usual_range(1e-4) == "inside the usual range of λ, 1e-5 to 1e-3"
    assert "no advice" in usual_range(0.0873)


@pytest.fixture
def audit(report: AuditReport) -> ImplementationAudit:
    return implementation_example(report)


def stored(storage: str, delta_src: float, *, scale: float = 1.0) -> StoredLogits:
    return StoredLogits(storage, scale, 96, 1e-4, delta_src, delta_src, delta_src, 1.0)


def update(storage: str, error: float, *, scale: float = 1.0) -> UpdateErrors:
    return UpdateErrors(storage, scale, "z", "head", 96, error, 1.0, error, 1.0)


def test_delta_src_of_stored_logits_fires_the_stage(audit: ImplementationAudit) -> None:
    both = replace(audit, source=(stored("bf16", 0.03), stored("fp16", 0.004)), updates=())
    fired = stage(decide(None, implementation_audits=[both]), IMPLEMENTATION)
    assert fired.fired is True
    assert fired.value == 0.03
    assert "stored in bf16) exceeds 0.01" in fired.reason
    assert "within it: logits of tiny-tied stored in fp16" in fired.reason
    assert "findings" not in fired.reason  # no loss was audited
    assert "fp32" in fired.action
    quiet = replace(both, source=(stored("fp16", 0.004),))
    assert stage(decide(None, implementation_audits=[quiet]), IMPLEMENTATION).fired is False
    strict = decide(None, implementation_audits=[quiet], thresholds=Thresholds(delta_src=0.003))
    assert stage(strict, IMPLEMENTATION).fired is True


def test_delta_theta_fires_it_as_well(audit: ImplementationAudit) -> None:
    far = replace(audit, source=(stored("bf16", 0.005),), updates=(update("bf16", 0.02), update("bf16", 0.001)))
    fired = stage(decide(None, implementation_audits=[far]), IMPLEMENTATION)
    assert fired.fired is True
    assert "Δ_θ = 0.02 (bf16 logits, Z gradient of the head) exceeds 0.01" in fired.reason
    lenient = decide(None, implementation_audits=[far], thresholds=Thresholds(delta_theta=0.05))
    assert stage(lenient, IMPLEMENTATION).fired is False
    alone = replace(far, source=())
    assert stage(decide(None, implementation_audits=[alone]), IMPLEMENTATION).value == 0.02


def test_larger_logits_than_the_models_own_are_not_judged(audit: ImplementationAudit) -> None:
    scaled = replace(
        audit,
        source=(stored("bf16", 0.005), stored("bf16", 0.5, scale=4.0)),
        updates=(update("bf16", 0.001), update("bf16", 0.5, scale=4.0)),
    )
    assert stage(decide(None, implementation_audits=[scaled]), IMPLEMENTATION).fired is False


def test_an_audit_without_numbers_leaves_the_stage_open(audit: ImplementationAudit) -> None:
    empty = replace(audit, source=(), updates=(), overflow=(), status="partial")
    decisions = decide(None, implementation_audits=[empty])
    assert stage(decisions, IMPLEMENTATION).fired is None
    assert "zloss audit-implementation" in stage(decisions, IMPLEMENTATION).reason
    assert stage(decisions, OPTIMIZER).fired is None


def rooms(ce: float, standard: float) -> tuple[Fp16Headroom, ...]:
    return (Fp16Headroom("ce", 0.0, 2, 1.0, 1.0, ce), Fp16Headroom("standard", 1e-3, 2, 1.0, 1.0, standard))


def test_the_papers_overflow_numbers_fire_the_optimizer_stage(audit: ImplementationAudit) -> None:
    """tab:overflow_audit, GPT-2: κ_min 6718 of CE falls to 731 under standard Z-loss."""
    fired = stage(decide(None, implementation_audits=[replace(audit, overflow=rooms(6718, 731))]), OPTIMIZER)
    assert fired.fired is True
    assert "Standard, λ 0.001 on tiny-tied: smallest safe fp16 scale κ 6.72e+03 → 731 (limit ÷ 3)" in fired.reason
    assert fired.value == pytest.approx(6718 / 731)
    assert [(effect.before, effect.after) for effect in fired.measured] == [(6718, 731)]
    lenient = decide(
        None,
        implementation_audits=[replace(audit, overflow=rooms(6718, 731))],
        thresholds=Thresholds(fp16_margin_ratio=10),
    )
    assert stage(lenient, OPTIMIZER).fired is None


def test_a_margin_within_its_limit_does_not_speak_for_training(
    audit: ImplementationAudit, comparison: Comparison
) -> None:
    calm = replace(audit, overflow=rooms(7606, 6983))
    open_ = stage(decide(None, implementation_audits=[calm]), OPTIMIZER)
    assert open_.fired is None
    assert "6.98e+03" in open_.reason
    # With compared runs the stage is decided by them, and the margin is named.
    runs = replace(comparison, methods=tuple(m for m in comparison.methods if m.method != "heavy"))
    quiet = decide(None, implementation_audits=[calm], comparisons=[runs], thresholds=Thresholds(grad_tail_ratio=1e9))
    assert stage(quiet, OPTIMIZER).fired is False
    assert "6.98e+03" in stage(quiet, OPTIMIZER).reason
    narrow = replace(audit, overflow=rooms(7606, 69))
    loud = decide(None, implementation_audits=[narrow], comparisons=[runs], thresholds=Thresholds(grad_tail_ratio=1e9))
    assert stage(loud, OPTIMIZER).fired is True
    assert "kappa_min" in [effect.quantity for effect in stage(loud, OPTIMIZER).measured]


def test_a_gradient_that_is_not_finite_has_no_margin(audit: ImplementationAudit) -> None:
    broken = replace(audit, overflow=rooms(7606, 0.0))
    assert stage(decide(None, implementation_audits=[broken]), OPTIMIZER).fired is True


def test_it_reaches_every_map(report: AuditReport, audit: ImplementationAudit) -> None:
    results = decide_results((report,), implementation_audits=(audit,))
    assert results.implementation_audits == (audit,)
    assert stage(results.maps[0].decisions, IMPLEMENTATION).fired is True
    assert stage(with_decisions(report, implementation_audits=[audit]).decisions, IMPLEMENTATION).fired is True
    (shared,) = decide_results(implementation_audits=(audit,)).maps
    assert stage(shared.decisions, IMPLEMENTATION).fired is True


@pytest.mark.parametrize("name", [stage.name for stage in STAGES])
def test_every_hint_names_a_command_with_the_options_it_has(name: str) -> None:
    import importlib

    found = next(stage for stage in STAGES if stage.name == name)
    assert found.commands
    for command in found.commands:
        program, word, *options = command.split()
        assert program == "zloss"
        entry = COMMANDS[word]
        known = flags_of(getattr(importlib.import_module(f"zloss.cli.{entry.module}"), entry.type_name)).values()
        assert {option for option in options if option.startswith("--")} <= set(known)


STATED = router_scale_table(1e-3, "active_route_mean", layers=4, top_k=4, tokens=64)


def test_a_dense_model_was_told_to_evaluate_its_router(report: AuditReport) -> None:
    found = stage(decide(report), ROUTER)
    assert found.fired is None
    assert found.reason == (
        "The audited model has no router. To evaluate this stage for a model that has one: `zloss router-scale --out DIR`."
    )


def test_the_router_scale_of_another_model_passed_for_that_of_the_audited_one(
    report: AuditReport, comparison: Comparison
) -> None:
    variant = RouterVariant("active_route_mean", 1e-3, s_rel=4.0)
    runs = replace(comparison, model="experts", router=RouterVariants("ce", (variant,)))
    measured = MeasuredScale(1e-3, 0.0, (1.0,), 4.0, 4.0, (4.0,), None, 0.0)
    for decisions, source in (
        (decide(report, routers=[STATED]), "the coefficient that was stated to `zloss router-scale`"),
        (decide(report, routers=[measured]), "a router loss that was measured by itself"),
        (decide(report, comparisons=[runs]), "the compared runs of experts"),
    ):
        found = stage(decisions, ROUTER)
        assert found.fired is True
        assert found.reason.endswith(f". The audited model has no router; this is of {source}.")
        assert "in the model that has the router, match the coefficient" in bottom_line((found,))
    # Alone it is of no audited model.
    alone = stage(decide(None, routers=[STATED]), ROUTER)
    assert "audited model" not in alone.reason
    assert alone.action == "Match the coefficient so that s_rel = 1"


def test_an_audit_that_left_the_routers_out_does_not_say_that_there_are_none(report: AuditReport) -> None:
    for unknown in (replace(report, status="partial"), replace(report, reasons={"router": "left out"})):
        for decisions in (decide(unknown), decide(unknown, routers=[STATED])):
            assert "has no router" not in stage(decisions, ROUTER).reason
