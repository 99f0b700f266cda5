"""Settings of a recommendation: what is refused in one sentence, and what the runs are made of."""

from __future__ import annotations

import json
from pathlib import Path
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
        ({"seeds": (1,)}, "`seeds` is expected to list at least two seeds"),
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
    given = ({}, {"steps": 100}, {"steps": 100, "budget": "1m"})
    assert [RecommendConfig(**options).budget_seconds for options in given] == [1800, None, 60]


def test_a_constant_schedule_and_a_given_state_of_adam_stand_for_the_middle_of_a_training() -> None:
    plain = RecommendConfig().train_config(CE, 1, 100)
    assert (plain.lr_floor, plain.warmup, plain.optimizer_state) == (0.0, 10, None)
    middle = RecommendConfig(schedule="constant", optimizer_state="adam.pt", lr=3e-4).train_config(CE, 1, 100)
    assert (middle.warmup, middle.optimizer_state) == (0, "adam.pt")
    assert {middle.lr_at(step) for step in (1, 50, 100)} == {3e-4}


def trainer_state(folder: Path, **changes: Any) -> str:
    """A Trainer's checkpoint as far as its JSON goes."""
    rates = [{"learning_rate": rate, "step": step} for step, rate in ((100, 5e-4), (500, 3e-4))]
    state = {"global_step": 500, "max_steps": 1000, "train_batch_size": 8, "log_history": [*rates, {"eval_loss": 3.0}]}
    (folder / "trainer_state.json").write_text(json.dumps({**state, **changes}))
    return str(folder)


def test_a_trainer_checkpoint_states_learning_rate_and_batch(tmp_path: Path) -> None:
    config = RecommendConfig(model=trainer_state(tmp_path), accumulate=2)
    run = config.train_config(CE, 1, 100)
    assert (run.lr, run.micro_batch, run.lr_floor, config.tokens_per_step) == (3e-4, 8, 1.0, 4096)
    assert config.training.known == (
        "learning rate 0.0003 at step 500 (trainer_state.json)",
        "8 sequences per micro-batch (trainer_state.json)",
    )
    assert config.training.assumed == ("a constant schedule", "a fresh Adam state")
    assert config.settings(100) | {"lr": 3e-4, "schedule": "constant", "micro_batch": 8} == config.settings(100)
    # The runs are those of the same settings set explicitly.
    explicit = {"lr": 3e-4, "schedule": "constant", "micro_batch": 8, "accumulate": 2}
    assert RecommendConfig(**explicit).fingerprint("t") == config.fingerprint("t")


def test_a_schedule_in_a_pickled_file_is_not_read_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(b"")
    config = RecommendConfig(model=trainer_state(tmp_path))
    assert config.of_a_trainer
    assert config.training.assumed[0] == "a constant schedule (training_args.bin was not read, because it is pickled)"


def test_explicit_options_win_over_the_checkpoint_and_are_not_assumptions(tmp_path: Path) -> None:
    model = trainer_state(tmp_path)
    training = RecommendConfig(
        model=model, lr=1e-4, schedule="cosine", micro_batch=1, optimizer_state="adam.pt"
    ).training
    assert (training.lr, training.schedule, training.micro_batch) == (1e-4, "cosine", 1)
    assert (training.known, training.assumed) == (("the optimizer state (adam.pt)",), ())
    assert RecommendConfig(model=model, schedule="cosine").training.schedule == "cosine"
    # Without the learning rate of the checkpoint there is no reason to keep it constant.
    assert RecommendConfig(model=model, lr=1e-4).training.schedule == "cosine"


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        ({"global_step": 1000}, 8),  # finished: its last learning rate ends a schedule
        ({"global_step": None}, 8),
        ({"log_history": []}, 8),
        ({"log_history": [{"learning_rate": 0.0}]}, 8),
        ({"log_history": [{"learning_rate": "3e-4"}]}, 8),
        ({"log_history": "none", "train_batch_size": 0}, 2),
        ({"log_history": [3], "train_batch_size": True}, 2),
    ],
)
def test_what_a_checkpoint_does_not_say_is_an_assumption(tmp_path: Path, changes: dict[str, Any], batch: int) -> None:
    training = RecommendConfig(model=trainer_state(tmp_path, **changes)).training
    assert (training.lr, training.schedule, training.micro_batch) == (5e-5, "cosine", batch)
    assert training.assumed[:2] == ("learning rate 5e-05", "a cosine schedule")


@pytest.mark.parametrize("text", [None, "", "[1]", "{", "\xff"])
def test_a_missing_or_damaged_state_of_a_trainer_states_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "trainer_state.json").write_bytes(text.encode("latin-1"))
    training = RecommendConfig(model=str(tmp_path)).training
    assert training.known == ()
    assert training.assumed == (
        *("learning rate 5e-05", "a cosine schedule", "512 tokens per step", "a fresh Adam state"),
    )


def test_the_audit_is_about_the_logits_of_the_stack() -> None:
    stored = {each: RecommendConfig(precision=each).audit_config().logits for each in ("fp32", "bf16", "fp16")}
    assert stored == {"fp32": "bf16", "bf16": "bf16", "fp16": "fp16"}


def test_a_run_differs_from_another_in_arm_and_seed_alone() -> None:
    config = RecommendConfig()
    one, other = config.train_config(CE, 1, 100), config.train_config(Arm("centered", 1e-4), 2, 100)
    different = {name for name in vars(one) if getattr(one, name) != getattr(other, name)}
    assert different == {"method", "coef", "seed"}


def test_one_tokenizer_is_that_of_the_audits_and_of_every_run() -> None:
    config = RecommendConfig(tokenizer="other")
    made = (config.audit_config(), config.implementation_config(CE), config.train_config(CE, 1, 100))
    assert [each.tokenizer for each in made] == ["other"] * 3
    assert config.audit_config().fingerprint("t") != RecommendConfig().audit_config().fingerprint("t")
    # The tokens are part of the identity of the runs already.
    assert config.fingerprint("t") == RecommendConfig().fingerprint("t")


def test_the_identity_follows_the_training_and_not_the_request() -> None:
    base = RecommendConfig()
    same = (RecommendConfig(budget="9m"), RecommendConfig(seeds=(4, 5)), RecommendConfig(tolerance_ppl=1.0))
    assert {each.fingerprint("t") for each in same} == {base.fingerprint("t")}
    other = (RecommendConfig(lr=1e-4), RecommendConfig(block_size=128), RecommendConfig(precision="bf16"))
    assert len({each.fingerprint("t") for each in (*other, base)}) == 4
    assert base.fingerprint("t") != base.fingerprint("u")
