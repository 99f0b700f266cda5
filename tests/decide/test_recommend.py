"""Candidates, the time plan, early stopping, and the answer of a recommendation, on made-up numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.decide.test_answer import with_fired
from zloss.decide.recommend import (
    EvaluatedArm,
    Speed,
    budget_coef,
    candidates,
    certain_rejection,
    choose,
    decide_answer,
    evaluate_arms,
    least_endpoints,
    one_digit,
    plan_time,
    planned_runs,
    ranked,
    rounded_duration,
    with_references,
)
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict_parts import endpoint_limits, judge_endpoints
from zloss.errors import InputError
from zloss.optimizer.endpoints import endpoints
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison, Verdict, VerdictName
from zloss.results.decision import LambdaBudget
from zloss.results.recommendation import Arm
from zloss.results.steps import AdamSample, StepRecord

BUDGET = LambdaBudget(r_z=0.05, raw=3.7e-4, centered=8.2e-3)


def keys(report: AuditReport, *fired: str) -> list[tuple[str, float]]:
    return [arm.key for arm in candidates(with_fired(report, *fired, lambda_budget=BUDGET))]


def test_every_stage_proposes_its_method_in_the_order_of_actions(report: AuditReport) -> None:
    everything = keys(
        report, "Source coordinate", "Objective decomposition", "Architectural transport", "Shared pathway"
    )
    assert everything[:4] == [("centered", 1e-3), ("factorized", 3e-4), ("standard", 3e-4), ("gain-aware", 3e-4)]
    assert everything[4:] == [("centered", 1e-4), ("factorized", 3e-5), ("standard", 3e-5)]
    assert keys(report, "Source coordinate") == [("centered", 1e-3), ("centered", 1e-4)]
    assert keys(report, "Shared pathway") == [("standard", 3e-4), ("standard", 3e-5)]
    assert keys(report, "Objective decomposition")[0] == ("factorized", 3e-4)


def test_where_nothing_fired_the_usual_recipe_is_run_to_compare_with(report: AuditReport) -> None:
    (first, *_) = candidates(with_fired(report, lambda_budget=BUDGET))
    assert (first.key, first.stages) == (("standard", 3e-4), ())
    assert "no stage fired" in first.note


def test_an_arm_names_the_stages_that_proposed_it(report: AuditReport) -> None:
    found = candidates(with_fired(report, "Architectural transport", "Shared pathway", lambda_budget=BUDGET))
    assert found[0].stages == ("Architectural transport", "Shared pathway")
    assert found[1].stages == ("Architectural transport",)


@pytest.mark.parametrize(
    ("solved", "coef", "said"),
    [
        (3.7e-4, 3e-4, "λ of R_Z = 0.05"),
        (0.0873, 1e-3, "would allow 0.087"),
        (2.2e-6, 2e-6, "below the usual range"),
        (None, 1e-4, "was not measured"),
    ],
)
def test_a_coefficient_never_exceeds_its_budget(solved: float | None, coef: float, said: str) -> None:
    found, note = budget_coef(solved, 0.05)
    assert found == coef
    assert said in note


def test_rounding_is_down() -> None:
    assert [one_digit(value) for value in (1e-3, 9.99e-4, 3.0e-4, 1e-5)] == [1e-3, 9e-4, 3e-4, 1e-5]


def test_gain_aware_comes_with_standard_at_its_coefficient() -> None:
    arms = (Arm("gain-aware", 1e-4), Arm("standard", 1e-3))
    assert [arm.key for arm in with_references(arms)] == [
        ("standard", 1e-4),
        ("gain-aware", 1e-4),
        ("standard", 1e-3),
    ]
    assert with_references(arms[1:]) == arms[1:]


ARMS = (Arm("centered", 1e-3), Arm("standard", 1e-3), Arm("factorized", 1e-3))
SPEED = Speed(step=1.0, run=20.0, fixed=60.0)
"""A run of 100 steps takes 120 s."""
SEEDS = (1, 2, 3)


def test_without_a_budget_every_arm_runs() -> None:
    assert plan_time(ARMS, SEEDS, SPEED, budget=None, steps=150) == (ARMS, SEEDS, 150)
    assert SPEED.seconds(planned_runs(ARMS, SEEDS), 150) == 60 + 8 * 170


@pytest.mark.parametrize(
    ("runs", "arms", "seeds"), [(8, 3, 3), (7, 2, 3), (6, 1, 3), (5, 2, 2), (4, 1, 2)], ids=lambda value: str(value)
)
def test_arms_are_left_out_before_seeds_and_no_run_is_shorter(runs: int, arms: int, seeds: int) -> None:
    budget = (60 + runs * 120) / 0.9 + 1
    assert plan_time(ARMS, SEEDS, SPEED, budget=budget) == (ARMS[:arms], SEEDS[:seeds], 100)
    assert planned_runs(ARMS[:arms], SEEDS[:seeds]) == runs
    assert SPEED.seconds(runs, 100) <= 0.9 * budget


@pytest.mark.parametrize(("budget", "steps", "planned"), [(4000, None, 400), (1e6, None, 1000), (4000, 100, 100)])
def test_room_behind_all_arms_makes_the_runs_longer_up_to_a_limit(
    budget: float, steps: int | None, planned: int
) -> None:
    assert plan_time(ARMS, SEEDS, SPEED, budget=budget, steps=steps) == (ARMS, SEEDS, planned)
    assert SPEED.seconds(8, planned) <= 0.9 * budget


def test_the_confirmation_of_gain_aware_has_room_for_its_reference() -> None:
    arms, seeds, _ = plan_time((Arm("gain-aware", 1e-3),), (1, 2), SPEED, budget=None)
    assert [arm.method for arm in arms] == ["standard", "gain-aware"]
    assert planned_runs(arms, seeds) == 3 + 3


def test_too_small_a_budget_is_one_sentence_that_names_what_is_needed() -> None:
    wanted = r"`budget` is 9 min, but CE and one arm on two seeds, 4 runs of 100 steps .* need about 10 min"
    with pytest.raises(InputError, match=wanted):
        plan_time(ARMS, SEEDS, SPEED, budget=540)
    with pytest.raises(InputError, match="200 steps"):
        plan_time(ARMS[:1], (1, 2), SPEED, budget=540, steps=200)
    assert plan_time(ARMS[:1], (1, 2), SPEED, budget=601, steps=100) == (ARMS[:1], (1, 2), 100)


def test_durations_in_words() -> None:
    assert [rounded_duration(value) for value in (5, 89, 90, 3600, 3700)] == [
        "5 s",
        "89 s",
        "2 min",
        "1 h",
        "1 h 2 min",
    ]


STEPS = 100


def step(number: int, norm: float = 1.0, loss: float = 3.0) -> StepRecord:
    adam = AdamSample(1e-4, 1.0, 1.0, 1.0, 1.0, 10.0)
    return StepRecord(number, loss, loss, 0.0, norm, norm / 10, 10.0, norm, norm / 10, adam=adam)


CALM = [step(i) for i in range(1, STEPS + 1)]
BASELINE = endpoints(CALM, clip=1.0).flat()


def reason(records: list[StepRecord]) -> str | None:
    return certain_rejection(records, BASELINE, steps=STEPS, spike=0.5, thresholds=Thresholds())


def test_a_calm_arm_is_never_stopped() -> None:
    assert all(reason(CALM[:done]) is None for done in range(1, STEPS + 1))


def test_a_gradient_far_above_all_of_ce_stops_at_once() -> None:
    found = reason([*CALM[:4], step(5, norm=3.5)])
    assert found.startswith("max ‖g‖₂ × 3.5")
    assert reason([*CALM[:4], step(5, norm=2.9)]) is None


def test_a_nonfinite_step_stops() -> None:
    bad = replace(step(2), gradient="nan", grad_norm=math.nan, grad_inf=math.nan)
    assert "nonfinite" in (reason([CALM[0], bad]) or "")


def test_events_are_counted_over_the_whole_run_not_over_the_steps_so_far() -> None:
    spikes = [step(1), step(2, loss=4.0), step(3), step(4, loss=4.0)]
    # Two of 99 pairs are 0.0202, just above the limit of 0.02; one is below, though a third of the steps so far.
    assert reason(spikes[:3]) is None
    assert "spike rate" in (reason(spikes) or "")


def test_no_arm_is_stopped_that_the_whole_run_would_not_reject() -> None:
    """Whatever the remaining steps are, the least endpoints are not above those of the finished run."""
    wild = [step(i, norm=1 + (i * 7919 % 23), loss=3 + (i * 31 % 5) / 4) for i in range(1, STEPS + 1)]
    events = [key for key in BASELINE if key.startswith("phi_")]
    whole = endpoints(wild, clip=1.0).flat()
    for done in range(1, STEPS + 1):
        least = least_endpoints(wild[:done], events, steps=STEPS, spike=0.5)
        assert all(value is None or value <= whole[key] + 1e-12 for key, value in least.items()), done
    assert reason(wild) is not None
    limits = endpoint_limits(Thresholds(), BASELINE.keys() & whole.keys(), STEPS)
    assert judge_endpoints(limits, [(BASELINE, whole)]).state == "fails"


def arm(
    method: str = "centered", coef: float = 1e-3, *, passes: bool = True, verdict: VerdictName = "inconclusive"
) -> EvaluatedArm:
    found = Verdict(method, coef, delta_ppl=0.0, accepted=None, verdict=verdict, reasons=())
    return EvaluatedArm(found, 0.0, 0.9, 0.8, "" if passes else "ΔCE is above the tolerance")


HEAD = arm("centered-head", 0.0, verdict="accepted")


@pytest.mark.parametrize(
    ("chosen", "confirmed", "head", "wanted"),
    [
        (arm(), arm(verdict="accepted"), None, ("confirmed here", "centered", 1e-3)),
        (arm(), arm(), HEAD, ("direction only", "centered", 1e-3)),
        (arm(), arm(passes=False), None, ("undecided", None, None)),
        (arm(), arm(passes=False), HEAD, ("confirmed here", "centered-head", 0.0)),
        (arm(passes=False), arm(passes=False, verdict="rejected"), None, ("confirmed here", "ce", 0.0)),
        (arm(passes=False), arm(passes=False), None, ("direction only", "ce", 0.0)),
        (arm(passes=False), arm(), None, ("undecided", None, None)),
        (arm(passes=False), arm(passes=False), HEAD, ("confirmed here", "centered-head", 0.0)),
        (arm(passes=False), arm(), HEAD, ("confirmed here", "centered-head", 0.0)),
        (HEAD, HEAD, HEAD, ("confirmed here", "centered-head", 0.0)),
        (arm(), None, None, ("undecided", None, None)),
        (None, None, None, ("undecided", None, None)),
    ],
)
def test_every_row_of_the_table(
    chosen: EvaluatedArm | None,
    confirmed: EvaluatedArm | None,
    head: EvaluatedArm | None,
    wanted: tuple[str, str | None, float | None],
) -> None:
    found = decide_answer(chosen, confirmed, head, diagnosed=True)
    assert (found.level, found.method, found.coef) == wanted
    assert found.why.endswith(".") or ":" in found.why


def test_the_guide_had_other_rows_than_the_rule() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "recommend.md").read_text(encoding="utf-8")
    lines = [line.strip() for line in (decide_answer.__doc__ or "").splitlines()]
    rows = [line for line in lines if line.startswith("| ") and "| answer |" not in line]
    assert len(rows) == 9
    for row in rows:
        assert row.replace("what one has", "what you have") in guide, row


def test_where_every_arm_was_stopped_no_z_loss_is_an_answer() -> None:
    assert decide_answer(None, None, None, diagnosed=True, stopped=2).method == "ce"
    assert decide_answer(None, None, HEAD, diagnosed=True, stopped=2).method == "centered-head"


def test_without_a_diagnosis_the_answer_is_no_z_loss() -> None:
    found = decide_answer(arm(), arm(verdict="accepted"), None, diagnosed=False)
    assert (found.level, found.method) == ("direction only", "ce")
    rejected = decide_answer(arm(), arm(passes=False, verdict="rejected"), None, diagnosed=False)
    assert rejected.level == "confirmed here"


def test_arms_that_pass_come_first_by_what_reaches_the_hidden_state() -> None:
    small, large = replace(arm("a"), transported=0.5), replace(arm("b"), transported=0.9)
    near, far = replace(arm("c", passes=False), delta_ce=0.01), replace(arm("d", passes=False), delta_ce=0.5)
    assert [one.key[0] for one in ranked((far, large, near, small))] == ["a", "b", "c", "d"]


def test_centered_head_is_chosen_only_where_the_shift_was_diagnosed_and_only_if_it_passes() -> None:
    head, standard = replace(HEAD, transported=0.1), replace(arm("standard"), transported=0.5)
    assert choose((standard, head), centered_head=True) == head
    assert choose((standard, head), centered_head=False) == standard
    near, far = replace(arm("a", passes=False), delta_ce=0.01), replace(arm("b", passes=False), delta_ce=0.5)
    failed = replace(arm("centered-head", 0.0, passes=False), delta_ce=0.0)
    assert choose((far, failed, near), centered_head=True) == near
    assert choose((failed,), centered_head=True) is None


def test_a_verdict_that_rejects_never_passes(comparison: Comparison) -> None:
    judged = evaluate_arms(comparison)
    for one in judged:
        if one.verdict.verdict == "rejected":
            assert not one.passes
            assert one.objection.startswith("rejected")
