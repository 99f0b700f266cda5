"""What the decision map reads of an implementation audit: Δ_src and Δ_θ of stored logits, and the fp16 margin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.laws.example_results import implementation_example
from zloss.cli.main import COMMANDS
from zloss.cli.options import flags_of
from zloss.decide.decided_results import decide_results
from zloss.decide.decision_map import decide, with_decisions
from zloss.decide.stages import STAGES
from zloss.decide.thresholds import Thresholds
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.decision import Decision
from zloss.results.implementation_audit import Fp16Headroom, ImplementationAudit, StoredLogits, UpdateErrors

IMPLEMENTATION, OPTIMIZER = "Implementation", "Optimizer consequence"


def stage(decisions: tuple[Decision, ...], name: str) -> Decision:
    return next(decision for decision in decisions if decision.stage == name)


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
