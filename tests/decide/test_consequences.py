"""Whether findings matter, and the one verdict: every rule at its limit, the order of precedence, and what never decides."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.decide.made_up_recommendation import made_up_recommendation
from tests.laws.example_results import ROUTERS, implementation_example
from tests.measured_reports import weighed
from zloss.decide.consequences import lambda_limit
from zloss.decide.decision_map import with_decisions
from zloss.decide.recommend import one_digit
from zloss.decide.thresholds import Thresholds
from zloss.results.audit import AuditReport, HeadNumbers
from zloss.results.comparison import Comparison, RouterVariant, RouterVariants, VerdictPart, VerdictParts
from zloss.results.decision import ActionVerdict, Consequence
from zloss.results.implementation_audit import UpdateErrors
from zloss.results.loss_audit import Finding, LossAudit
from zloss.results.quantities import coefficient

SHIFTED = (0.24, 0.02)
"""bf16 noise before and after centering of a head that needs it."""
NOTHING_MEASURED = "Nothing measured in this checkpoint calls for a Z-loss or a centered head."


def verdict(report: AuditReport, **joined: Any) -> ActionVerdict:
    found = with_decisions(report, **joined).verdict
    assert found is not None
    return found


def trained_with(found: ActionVerdict) -> tuple[str, ...]:
    """What it says about training with a Z-loss nevertheless."""
    assert found.if_trained is not None
    return found.if_trained


def consequence(report: AuditReport, stage: str, **joined: Any) -> Consequence:
    (found,) = (one.consequence for one in with_decisions(report, **joined).decisions if one.stage == stage)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("stage", "below", "at"),
    [
        # S must reach 0.01 nat, and centering must recover one bit.
        ("Source coordinate", {"noise": (0.0099, 0.001)}, {"noise": (0.01, 0.001)}),
        ("Source coordinate", {"noise": (0.04, 0.0201)}, {"noise": (0.04, 0.02)}),
        ("Objective decomposition", {"noise": (0.06, 0.0499)}, {"noise": (0.06, 0.05)}),
        ("Architectural transport", {"gain": 0.0999}, {"gain": 0.1}),
        ("Shared pathway", {"input_path": 0.0499}, {"input_path": 0.05}),
    ],
)
def test_a_consequence_matters_from_its_limit_on(
    bare: AuditReport, stage: str, below: dict[str, Any], at: dict[str, Any]
) -> None:
    assert consequence(weighed(bare, **below), stage).matters is False
    assert consequence(weighed(bare, **at), stage).matters is True


def test_limits_can_be_set_and_are_stored(bare: AuditReport) -> None:
    limits = Thresholds(gain_share=0.5)
    found = with_decisions(weighed(bare, gain=0.3), thresholds=limits)
    assert found.verdict is not None
    assert found.verdict.action == "nothing"
    assert found.thresholds["gain_share"] == 0.5
    assert verdict(weighed(bare, gain=0.3)).action == "not_enough_evidence"


def test_harmless_findings_are_named_and_call_for_nothing(bare: AuditReport) -> None:
    """An audit of such a model opened with "First: factorized Z-loss"."""
    fired = with_decisions(weighed(bare), thresholds=Thresholds(shift_over_log_v=0, gain_99=0, input_path_ratio=0))
    assert sum(bool(one.fired) for one in fired.decisions) >= 2
    assert fired.verdict is not None
    assert fired.verdict.action == "nothing"
    assert fired.verdict.sentence == NOTHING_MEASURED
    assert fired.verdict.why[0].startswith("Present, but harmless here: a common shift of the logits, ")


@pytest.mark.parametrize(
    ("measured", "action"),
    [
        ({}, "nothing"),
        ({"gain": 0.2}, "not_enough_evidence"),
        ({"tokens": 1999}, "not_enough_evidence"),
        ({"noise": SHIFTED}, "center"),
    ],
)
def test_the_headline_did_not_say_that_the_planned_lambda_is_above_its_limit(
    bare: AuditReport, measured: dict[str, Any], action: str
) -> None:
    """A λ four times its limit was under "nothing to do", and next to a call for centering it was not mentioned at all."""
    above = verdict(weighed(bare, r_z=0.2, **measured))
    within, at = (verdict(weighed(bare, r_z=share, **measured)) for share in (0.04, 0.05))
    assert above.action == within.action == action
    assert above.sentence == f"{within.sentence} The planned λ = 1e-4 is above its limit of 2e-5."
    assert at.sentence == within.sentence
    # The reason is next to it, and is the first that concerns training.
    assert trained_with(above)[0].startswith("Keep λ at 2e-5 or below")
    assert set(trained_with(above)) < set(above.why)


def test_the_headline_names_every_coefficient_above_its_limit(bare: AuditReport) -> None:
    planned: dict[str, Any] = {"router_coef": 1e-3, "router_convention": "megatron", "router_share": 0.4}
    router, both = (weighed(replace(bare, router=ROUTERS), r_z=share, **planned) for share in (0.02, 0.2))
    assert verdict(router).sentence == f"{NOTHING_MEASURED} The planned λ_R = 1e-3 is above its limit of 2e-4."
    assert verdict(both).sentence.endswith(
        " The planned λ = 1e-4 is above its limit of 2e-5, and λ_R = 1e-3 is above its limit of 2e-4."
    )


def test_a_consequence_was_not_marked_as_ours(bare: AuditReport) -> None:
    """The paper has stages and their numbers; it does not say from which consequence on one matters."""
    for report in (weighed(bare), weighed(bare, noise=SHIFTED), weighed(bare, gain=0.2)):
        assert "Consequences and limits are ours, not the paper's." in verdict(report).confidence


def test_precision_that_centering_recovers_asks_for_it(bare: AuditReport) -> None:
    found = verdict(weighed(bare, noise=SHIFTED))
    assert found.action == "center"
    assert "0.020 instead of 0.240 nat" in found.sentence
    # Logits in fp32 have no 16-bit noise, whatever the shift.
    assert verdict(weighed(bare, noise=SHIFTED, logits="fp32")).action == "nothing"


def test_a_report_that_lacks_p99_mu_or_c_is_still_answered(bare: AuditReport) -> None:
    """A `mu_abs_99` of null next to measured noise was an AssertionError, a planned `target` of null a TypeError."""
    raw = replace(bare.heads.raw, mu_abs_99=None)
    found = verdict(weighed(replace(bare, heads=replace(bare.heads, raw=raw)), noise=SHIFTED))
    assert found.action == "center"
    assert found.changes[0] == "It removes the common shift."
    assert "c = log V" in verdict(weighed(bare, target=None)).confidence


@pytest.mark.parametrize("planned", [{"coef": 5e-324}, {"target": 1e308}])
def test_a_planned_loss_beyond_the_range_of_floats_is_answered(bare: AuditReport, planned: dict[str, Any]) -> None:
    """The limit of λ was infinite, zero or NaN, which has no first digit."""
    assert verdict(weighed(bare, **({"r_z": 1.0} | planned))).sentence


def test_a_soft_cap_leaves_the_raw_noise(bare: AuditReport) -> None:
    capped = replace(bare, model=replace(bare.model, softcap=30.0), heads=replace(bare.heads, centered=HeadNumbers()))
    noisy = weighed(capped, noise=(0.06, None))
    assert consequence(noisy, "Source coordinate").matters is False
    assert consequence(noisy, "Objective decomposition").value == 0.06
    assert verdict(noisy).action == "not_enough_evidence"


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"noise": (0.07, 0.06)}, "Keep the logits in fp32 now."),
        ({"gain": 0.2}, "a high output-to-hidden gain matters here"),
        ({"tokens": 1999}, "the text is too short"),
    ],
)
def test_a_checkpoint_alone_gives_at_most_not_enough_evidence(
    bare: AuditReport, measured: dict[str, Any], said: str
) -> None:
    found = verdict(weighed(bare, **measured))
    assert found.action == "not_enough_evidence"
    assert said in found.sentence
    assert ("zloss recommend" in found.sentence) == ("tokens" not in measured)


def test_a_finding_without_a_consequence_is_not_settled(bare: AuditReport) -> None:
    old = replace(bare, corpus=replace(bare.corpus, predictions=8192))
    assert verdict(old, thresholds=Thresholds(shift_over_log_v=0)).action == "not_enough_evidence"
    assert "run the audit again" in " ".join(verdict(old, thresholds=Thresholds(shift_over_log_v=0)).why)
    quiet = Thresholds(shift_over_log_v=1e9, component_share=1, gain_99=1e9, input_path_ratio=1e9)
    assert verdict(old, thresholds=quiet).action == "nothing"


def test_a_strong_input_path_limits_lambda_and_calls_for_nothing(bare: AuditReport) -> None:
    found = verdict(weighed(bare, input_path=0.1))
    assert found.action == "nothing"
    limit, why = trained_with(found)[0].partition(" For c = 0")[0].split(" (for c = log V): ")
    assert limit == "Keep λ at 5e-5 or below"
    assert (
        why
        == "at 1e-4 the Z gradient through the input embedding is 10 % of the table's CE gradient (limit 5 %), too strong."
    )
    # The finding is not listed among the harmless ones as well.
    assert sum("the tied table" in said for said in found.why) == 1


def test_lambda_is_advised_on_and_never_decides(bare: AuditReport) -> None:
    weak, strong = (verdict(weighed(bare, r_z=share)) for share in (0.004, 0.2))
    assert weak.action == strong.action == "nothing"
    assert trained_with(weak)[0].endswith("a Z-loss this weak would do nothing.")
    assert "too strong" in trained_with(strong)[0]
    assert "Keep λ at 2e-5 or below" in trained_with(strong)[0]  # 1e-4 · 0.05 / 0.2, rounded down
    fine = verdict(weighed(bare))
    assert all("would do nothing" not in one and "too strong" not in one for one in fine.why)
    assert all(set(trained_with(one)) < set(one.why) for one in (weak, strong, fine))


def test_why_none_is_needed_is_separate_from_how_strong_one_would_be(bare: AuditReport) -> None:
    """Half of the reasons for "needs no Z-loss" were about the strength of one."""
    found = verdict(weighed(bare, r_z=0.2))
    needed = [said for said in found.why if said not in trained_with(found)]
    assert needed
    assert not [said for said in needed if "Z gradient" in said and not said.startswith("Present, but harmless")]
    assert [re.split(" is | are ", said)[0] for said in trained_with(found) if "would matter" in said] == [
        "The largest Z gradients at the hidden states",
        "The Z gradient through the input embedding",
    ]


def test_the_only_limit_of_lambda_is_that_of_the_largest_ratio(bare: AuditReport) -> None:
    strong = weighed(bare, r_z=0.08, r_z_model=0.2, input_path=0.1)
    found = lambda_limit(strong, Thresholds())
    assert found is not None
    assert found[0] == pytest.approx(1e-4 * 0.05 / 0.2)
    assert "of the whole model" in found[1]
    said = " ".join(trained_with(verdict(strong)))
    assert said.count("Keep λ at") == 1
    assert lambda_limit(weighed(bare, r_z=0.0, input_path=None), Thresholds()) is None
    assert lambda_limit(bare, Thresholds()) is None


def test_the_limit_for_c_zero_follows_from_both_root_mean_squares(bare: AuditReport) -> None:
    log_z = [4.0, 9.0, 11.0, 30.0]
    c, mean = bare.target or 0.0, sum(log_z) / 4
    raw = replace(bare.heads.raw, log_z_mean=mean, diag_z=bare.diag_coef * sum((z - c) ** 2 for z in log_z) / 4)
    report = weighed(replace(bare, heads=replace(bare.heads, raw=raw)), r_z=0.2)
    ratio = math.sqrt(sum(z**2 for z in log_z) / sum((z - c) ** 2 for z in log_z))
    (said,) = (one for one in trained_with(verdict(report)) if "c = 0" in one)
    assert f"log Z − c is {ratio:.2g} times as large" in said
    assert f"about {coefficient(one_digit(1e-4 * 0.05 / 0.2 / ratio))}: " in said
    unknown = replace(report, heads=replace(report.heads, raw=replace(raw, log_z_mean=None)))
    (said,) = (one for one in trained_with(verdict(unknown)) if "c = 0" in one)
    assert "rerun with `--target 0`" in said
    assert "about" not in said
    # A limit that was measured at c = 0 needs no estimate.
    assert not [one for one in trained_with(verdict(weighed(bare, r_z=0.2, target=0.0))) if "For c = 0" in one]


def test_how_sure_counts_the_tokens_of_each_claim_and_the_checks_that_ran(bare: AuditReport) -> None:
    sure = verdict(weighed(bare, tokens=8192)).confidence
    blocks = bare.gradient.blocks if bare.gradient is not None else None
    for said in ("8,192 tokens of", "16-bit errors on 2,048", f"gradients on {blocks} blocks (2,048 tokens)"):
        assert said in sure
    # The model has no router, so seven stages apply; the loss and the training were not checked.
    assert "4 of 7 applicable checks ran; training was not tested." in sure
    assert " of 8 applicable checks" in verdict(weighed(replace(bare, router=ROUTERS))).confidence


@pytest.mark.parametrize("changes", [{"status": "partial"}, {"reasons": {"router": "left out"}}])
def test_routers_that_were_left_out_are_not_absent(bare: AuditReport, changes: dict[str, Any]) -> None:
    assert consequence(bare, "Router reduction").matters is False
    assert consequence(replace(bare, **changes), "Router reduction").matters is None


def test_a_router_without_its_coefficient_leaves_the_head_to_decide(bare: AuditReport) -> None:
    experts = replace(bare, router=ROUTERS)
    assert consequence(weighed(experts), "Router reduction").matters is None
    assert verdict(weighed(experts)).action == "nothing"
    assert verdict(weighed(experts, noise=SHIFTED)).action == "center"
    strong = weighed(experts, router_coef=1e-3, router_convention="megatron", router_share=0.4)
    assert consequence(strong, "Router reduction").matters is True
    assert "Keep λ_R at 2e-4 or below: that is 10 % of the CE gradient on the router weights." in trained_with(
        verdict(strong)
    )  # 1e-3 · 0.1 / 0.4, rounded down


# Joined results


def accepted(comparison: Comparison, model: str) -> Comparison:
    """The comparison with its first method accepted, as a file states it."""
    part = VerdictPart("holds", "It holds.", {"ratio": 0.5, "delta_ce": 0.0})
    parts = VerdictParts(coordinate=part, quality=part)
    first = replace(
        comparison.quality.methods[0], verdict="accepted", accepted=True, reasons=("Both hold.",), parts=parts
    )
    return replace(comparison, model=model, quality=replace(comparison.quality, methods=(first,)))


@pytest.fixture
def trained(bare: AuditReport, comparison: Comparison) -> Comparison:
    return accepted(comparison, bare.model.name)


def test_accepted_runs_of_this_model_ask_for_training(bare: AuditReport, trained: Comparison) -> None:
    found = verdict(weighed(bare, gain=0.2), comparisons=[trained])
    assert found.action == "train"
    assert found.sentence == "Train with Standard Z-loss at λ = 1e-2, c = log V: matched runs accepted it."
    # Runs of another model say nothing about this one.
    other = replace(trained, model="another")
    assert verdict(weighed(bare, gain=0.2), comparisons=[other]).action == "not_enough_evidence"


def with_method(comparison: Comparison, name: str, coef: float) -> Comparison:
    """The comparison with another name and coefficient for its first method with a verdict."""
    first = comparison.quality.methods[0]
    quality = replace(comparison.quality, methods=(replace(first, method=name, coef=coef),))
    methods = tuple(
        replace(one, method=name, coef=coef) if one.method == first.method else one for one in comparison.methods
    )
    return replace(comparison, quality=quality, methods=methods)


def test_an_accepted_centered_head_or_router_variant_asks_for_nothing(bare: AuditReport, trained: Comparison) -> None:
    """A centered head predicts what CE predicts, so it is always accepted: SmolLM2 would have been told to center."""
    for method, coef, action in (
        ("centered-head", 0.0, "nothing"),
        ("mu-centering", 0.0, "nothing"),
        ("mu-loss", 1e-4, "train"),
    ):
        renamed = with_method(trained, method, coef)
        found = verdict(weighed(bare), comparisons=[renamed])
        assert found.action == action
        # Nothing in this model matters, and the sentence says so.
        passed = "The μ-loss at γ = 1e-4 passed, but nothing measured in this model calls for it: "
        assert action == "nothing" or found.sentence.startswith(passed)
    routed = replace(trained, router=RouterVariants("ce", (RouterVariant("megatron", 1e-3, s_rel=1.0),)))
    assert verdict(weighed(bare), comparisons=[routed]).action == "nothing"
    assert verdict(weighed(bare), comparisons=[trained]).action == "train"


def test_no_comparison_without_an_accepted_method_asks_for_training(bare: AuditReport, comparison: Comparison) -> None:
    for measured, action in (({}, "nothing"), ({"gain": 0.2}, "not_enough_evidence")):
        same = replace(comparison, model=bare.model.name)
        assert verdict(weighed(bare, **measured), comparisons=[same]).action == action


def test_confirmed_runs_without_z_loss_settle_a_doubt(bare: AuditReport) -> None:
    made = made_up_recommendation()
    tested = replace(made.tested, model=bare.model.name)
    found = replace(made, objective="ce", coef=0.0, level="confirmed here", tested=tested)
    settled = verdict(weighed(bare, gain=0.2), recommendations=[found])
    assert settled.action == "nothing"
    assert settled.why[0].startswith("Matched runs found no Z-loss that helps: ")


def test_the_order_of_precedence(bare: AuditReport, trained: Comparison, loss_audit: LossAudit) -> None:
    twice = Finding("counted_twice", "finding", "Twice.", severity="error", remedy="add Z once")
    wrong = replace(loss_audit, findings=(twice,))
    everything = weighed(bare, noise=SHIFTED, gain=0.2)
    joined: dict[str, Any] = {"comparisons": [trained], "loss_audits": [wrong]}
    found = verdict(everything, **joined)
    assert found.action == "fix_implementation"
    assert "add Z once" in found.sentence
    del joined["loss_audits"]
    assert verdict(everything, **joined).action == "center"
    assert verdict(weighed(bare, gain=0.2), **joined).action == "train"
    assert verdict(weighed(bare, gain=0.2)).action == "not_enough_evidence"


@pytest.mark.parametrize(
    ("storage", "error", "matters"), [("bf16", 0.02, True), ("bf16", 0.009, False), ("fp16", 0.02, None)]
)
def test_stored_logits_count_in_the_precision_of_the_stack(
    bare: AuditReport, storage: str, error: float, matters: bool | None
) -> None:
    line = UpdateErrors(storage, 1.0, "total", "all", 256, error, 1.0, None, None)
    audit = replace(implementation_example(bare), updates=(line,))
    assert consequence(weighed(bare), "Implementation", implementation_audits=[audit]).matters is matters
