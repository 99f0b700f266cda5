"""Settings of a recommendation: what is refused in one sentence, and what the runs are made of."""

from __future__ import annotations

from typing import Any

import pytest

from zloss.errors import InputError
from zloss.protocol.config import RecommendConfig, parse_duration
from zloss.results.recommendation import Arm

CE = Arm("ce", 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": "soon"}, "`budget` is expected to be a time such as 90s, 30m or 1h30m"),
        ({"budget": "0s"}, "`budget` is expected to be more than 0 s"),
        ({"steps": 99}, "`steps` is expected to be at least 100"),
        ({"seeds": (1,)}, "`seeds` is expected to be at least two"),
        ({"seeds": (1, 1)}, "`seeds` is expected to be different"),
        ({"valid_blocks": 31}, "`valid_blocks` is expected to be at least 32"),
        ({"valid_blocks": 32, "block_size": 60}, "to give 2000 tokens"),
        ({"lr": 0.0}, "`lr` is expected to be a finite number > 0"),
        ({"precision": "fp8"}, "unknown `precision`"),
        ({"schedule": "linear"}, "unknown `schedule`"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RecommendConfig(**changes)


def test_times_in_words() -> None:
    assert [parse_duration(text) for text in ("90s", "30m", "1h30m", "0.5h", " 2 m ")] == [90, 1800, 5400, 1800, 120]
    with pytest.raises(InputError):
        parse_duration("30 minutes")


def test_the_budget_is_half_an_hour_unless_steps_or_a_time_are_given() -> None:
    assert RecommendConfig().budget_seconds == 1800
    assert RecommendConfig(steps=100).budget_seconds is None
    assert RecommendConfig(steps=100, budget="1m").budget_seconds == 60


def test_a_constant_schedule_and_a_given_state_of_adam_stand_for_the_middle_of_a_training() -> None:
    plain = RecommendConfig().train_config(CE, 1, 100)
    assert (plain.lr_floor, plain.warmup, plain.optimizer_state) == (0.0, 10, None)
    middle = RecommendConfig(schedule="constant", optimizer_state="adam.pt", lr=3e-4).train_config(CE, 1, 100)
    assert (middle.warmup, middle.optimizer_state) == (0, "adam.pt")
    assert {middle.lr_at(step) for step in (1, 50, 100)} == {3e-4}


def test_a_run_differs_from_another_in_arm_and_seed_alone() -> None:
    config = RecommendConfig()
    one, other = config.train_config(CE, 1, 100), config.train_config(Arm("centered", 1e-4), 2, 100)
    different = {name for name in vars(one) if getattr(one, name) != getattr(other, name)}
    assert different == {"method", "coef", "seed"}


def test_the_identity_follows_the_training_and_not_the_request() -> None:
    base = RecommendConfig()
    same = (RecommendConfig(budget="9m"), RecommendConfig(seeds=(4, 5)), RecommendConfig(tolerance_ppl=1.0))
    assert {each.fingerprint("t") for each in same} == {base.fingerprint("t")}
    other = (RecommendConfig(lr=1e-4), RecommendConfig(block_size=128), RecommendConfig(precision="bf16"))
    assert len({each.fingerprint("t") for each in (*other, base)}) == 4
    assert base.fingerprint("t") != base.fingerprint("u")
