"""Triggers of the optimizer and quality stages, the remedies of findings, and the bottom line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests import straight_audit
from zloss.audit.loss import findings
from zloss.decide.bottom_line import bottom_line, ordered_actions
from zloss.decide.budget import usual_range
from zloss.decide.decision_map import decide
from zloss.decide.remedies import REMEDIES, remedies_for
from zloss.decide.thresholds import Thresholds
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.decision import Decision
from zloss.results.loss_audit import Finding, LossAudit, SourceError
from zloss.results.update_error import UpdateError


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


OPTIMIZER, QUALITY = "Optimizer consequence", "Quality gate"


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
    decided = stage(decide(None, loss_audits=[audit_with("denominator_mismatch")]), "Implementation")
    assert decided.fired is True
    assert "one token count" in decided.action
    assert "log-sum-exp" not in decided.action
    assert decided.measured == ()  # its source is exact before and after
    both = remedies_for(["reported_z_dtype", "forward_backward_mismatch"])
    assert both.index("log-sum-exp") < both.index("fp32")
    assert remedies_for(["something_new"]) == "Mend something_new"


def test_every_finding_of_a_loss_audit_has_a_remedy() -> None:
    names = {module.ID for module in vars(findings).values() if hasattr(module, "ID")}
    assert len(names) > 15
    assert names <= REMEDIES.keys()


def test_only_errors_of_a_loss_audit_fire_the_implementation_stage() -> None:
    """A warning that is no fault of the trained gradient used to fire it."""
    mild = (
        Finding("all_ignored_nonfinite", "finding", "seen", None, "warning"),
        Finding("returned_values", "finding", "seen", None, "note"),
    )
    quiet = stage(decide(None, loss_audits=[replace(audit_with(), findings=mild)]), "Implementation")
    assert quiet.fired is False
    assert "no errors; warnings and notes: all_ignored_nonfinite, returned_values" in quiet.reason
    grave = Finding("counted_twice", "finding", "seen", None, "error")
    fired = stage(decide(None, loss_audits=[replace(audit_with(), findings=(*mild, grave))]), "Implementation")
    assert fired.fired is True
    assert "errors: counted_twice; warnings and notes: all_ignored" in fired.reason
    assert fired.action == remedies_for(["counted_twice"])
    unread = replace(audit_with(), findings=mild, source=SourceError(None, None, None, reason="not repeatable"))
    assert stage(decide(None, loss_audits=[unread]), "Implementation").fired is None


def test_implementation_reads_the_error_of_the_update() -> None:
    exact = audit_with()
    quiet = stage(decide(None, loss_audits=[exact], update_errors=[UpdateError("fp16", 1e-3)]), "Implementation")
    assert quiet.fired is False
    fired = stage(decide(None, loss_audits=[exact], update_errors=[UpdateError("bf16", 0.05)]), "Implementation")
    assert fired.fired is True
    assert "Δ_θ = 0.05 (bf16) exceeds 0.01" in fired.reason
    linear = replace(exact, source=replace(exact.source, bf16_inputs=0.02))
    assert stage(decide(None, loss_audits=[linear]), "Implementation").fired is True


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
