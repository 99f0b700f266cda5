"""How many arms, seeds and steps a budget of time gives: fewer arms rather than shorter runs.

    seconds = fixed + runs · (steps · step + run)
    runs = 1 + arms + confirmation seeds · (2, or 3 where Gain-aware may be chosen)

Every run has at least 100 steps. Where not all candidates fit, the last ones are left out, down to one; then confirmation
seeds, down to one; then the budget is too small. Where all fit, the steps grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zloss.decide.recommend.candidates import GAIN_AWARE, with_references
from zloss.errors import InputError
from zloss.results.comparison import FEW_STEPS
from zloss.results.recommend_plan import Arm

LEAST_STEPS, MOST_STEPS, STEP_UNIT = FEW_STEPS, 1000, 50
LEAST_RUNS = 4
"""Runs of the smallest plan: CE and one arm, on the selecting seed and on one confirming seed."""
SHARE = 0.9
"""Share of the budget that is planned; the rest is for what a probe of a few steps does not show."""


@dataclass(frozen=True)
class Speed:
    """What was measured of one run's cost, in seconds."""

    step: float
    """One optimizer step."""
    run: float
    """A run beside its steps."""
    fixed: float
    """Everything that is no run: what has passed, the audits that remain."""

    def seconds(self, runs: int, steps: int) -> float:
        """The whole command."""
        return self.fixed + runs * (steps * self.step + self.run)


@dataclass(frozen=True)
class TimePlan:
    """What fits."""

    arms: tuple[Arm, ...]
    """Arms with a run of the first seed, references included, without CE."""
    left_out: tuple[Arm, ...]
    seeds: tuple[int, ...]
    steps: int
    seconds: float


def plan_time(
    candidates: Sequence[Arm],
    seeds: Sequence[int],
    speed: Speed,
    *,
    budget: float | None,
    steps: int | None = None,
) -> TimePlan:
    """The plan of a budget in seconds; without one all arms, with `steps` or 100 steps each."""
    asked = steps or LEAST_STEPS
    if budget is None:
        return _plan(candidates, candidates, seeds, asked, speed)
    room = SHARE * budget
    for kept_seeds in range(len(seeds), 1, -1):
        for count in range(len(candidates), 0, -1):
            plan = _plan(candidates[:count], candidates, seeds[:kept_seeds], asked, speed)
            if plan.seconds <= room:
                if steps is None and count == len(candidates):
                    return _longer(plan, candidates, speed, room)
                return plan
    raise too_small(budget, asked, speed)


def too_small(budget: float, steps: int, speed: Speed) -> InputError:
    """The error of a budget without room for CE and one arm on two seeds."""
    needed = speed.seconds(LEAST_RUNS, steps) / SHARE
    return InputError(
        f"`budget` is {rounded_duration(budget)}, but CE and one arm on two seeds, {LEAST_RUNS} runs of {steps} steps at "
        f"{speed.step:.2g} s, need about {rounded_duration(needed)}: give more time, or fewer tokens per step with `micro_batch` "
        "or `block_size`."
    )


def check_budget(budget: float | None, steps: int | None, speed: Speed) -> None:
    """Refuse a budget that has no room for the smallest plan, before the audit begins."""
    asked = steps or LEAST_STEPS
    if budget is not None and speed.seconds(LEAST_RUNS, asked) > SHARE * budget:
        raise too_small(budget, asked, speed)


def planned_runs(arms: Sequence[Arm], seeds: Sequence[int]) -> int:
    """CE and the arms on the first seed; CE, the chosen arm and its reference on the others."""
    confirmed = 3 if any(arm.method == GAIN_AWARE for arm in arms) else 2
    return 1 + len(arms) + (len(seeds) - 1) * confirmed


def _plan(chosen: Sequence[Arm], candidates: Sequence[Arm], seeds: Sequence[int], steps: int, speed: Speed) -> TimePlan:
    arms = with_references(chosen)
    left_out = tuple(arm for arm in candidates if arm not in arms)
    return TimePlan(arms, left_out, tuple(seeds), steps, speed.seconds(planned_runs(arms, seeds), steps))


def _longer(plan: TimePlan, candidates: Sequence[Arm], speed: Speed, room: float) -> TimePlan:
    """The same arms with as many steps as fit, in units of 50."""
    runs = planned_runs(plan.arms, plan.seeds)
    most = (room - speed.seconds(runs, 0)) / (runs * speed.step) if speed.step > 0 else math.inf
    steps = max(plan.steps, min(MOST_STEPS, int(min(most, MOST_STEPS)) // STEP_UNIT * STEP_UNIT))
    return _plan(plan.arms, candidates, plan.seeds, steps, speed)


def rounded_duration(seconds: float) -> str:
    """A planned time in words, from 90 s on in whole minutes, rounded up.

    >>> rounded_duration(45), rounded_duration(1830), rounded_duration(5400)
    ('45 s', '31 min', '1 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
