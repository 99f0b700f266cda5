"""A budget of time is kept by fewer arms and fewer seeds, never by shorter runs."""

from __future__ import annotations

import pytest

from zloss.decide.recommend.time_plan import Speed, check_budget, plan_time, planned_runs, rounded_duration
from zloss.errors import InputError
from zloss.results.recommend_plan import Arm

ARMS = (Arm("centered", 1e-3), Arm("standard", 1e-3), Arm("factorized", 1e-3))
SPEED = Speed(step=1.0, run=20.0, fixed=60.0)
"""A run of 100 steps takes 120 s."""
SEEDS = (1, 2, 3)


def test_without_a_budget_every_arm_runs() -> None:
    plan = plan_time(ARMS, SEEDS, SPEED, budget=None, steps=150)
    assert (plan.arms, plan.left_out, plan.seeds, plan.steps) == (ARMS, (), SEEDS, 150)
    assert plan.seconds == 60 + 8 * 170


@pytest.mark.parametrize(
    ("runs", "arms", "seeds"), [(8, 3, 3), (7, 2, 3), (6, 1, 3), (5, 2, 2), (4, 1, 2)], ids=lambda value: str(value)
)
def test_arms_are_left_out_before_seeds_and_no_run_is_shorter(runs: int, arms: int, seeds: int) -> None:
    budget = (60 + runs * 120) / 0.9 + 1
    plan = plan_time(ARMS, SEEDS, SPEED, budget=budget)
    assert (len(plan.arms), len(plan.seeds), plan.steps) == (arms, seeds, 100)
    assert plan.arms == ARMS[:arms]
    assert plan.left_out == ARMS[arms:]
    assert plan.seconds <= 0.9 * budget
    assert planned_runs(plan.arms, plan.seeds) == runs


def test_room_behind_all_arms_makes_the_runs_longer_up_to_a_limit() -> None:
    plan = plan_time(ARMS, SEEDS, SPEED, budget=4000)
    assert plan.arms == ARMS
    assert plan.steps == 400
    assert plan.seconds <= 3600
    assert plan_time(ARMS, SEEDS, SPEED, budget=1e6).steps == 1000
    assert plan_time(ARMS, SEEDS, SPEED, budget=4000, steps=100).steps == 100


def test_the_confirmation_of_gain_aware_has_room_for_its_reference() -> None:
    arms = (Arm("gain-aware", 1e-3),)
    plan = plan_time(arms, (1, 2), SPEED, budget=None)
    assert [arm.method for arm in plan.arms] == ["standard", "gain-aware"]
    assert planned_runs(plan.arms, plan.seeds) == 3 + 3


def test_too_small_a_budget_is_one_sentence_that_names_what_is_needed() -> None:
    with pytest.raises(
        InputError, match=r"`budget` is 9 min, but CE and one arm on two seeds, 4 runs of 100 steps"
    ) as error:
        plan_time(ARMS, SEEDS, SPEED, budget=540)
    assert "need about 10 min" in str(error.value)
    with pytest.raises(InputError, match="200 steps"):
        check_budget(540, 200, SPEED)
    check_budget(None, 10_000, SPEED)
    check_budget(601, None, SPEED)


def test_durations_in_words() -> None:
    assert [rounded_duration(value) for value in (5, 89, 90, 3600, 3700)] == [
        "5 s",
        "89 s",
        "2 min",
        "1 h",
        "1 h 2 min",
    ]
