"""`attach` to a Trainer: its losses equal eager CE + Z, its logs have the telemetry, what bypasses the loss raises."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zloss
from tests.integrations.transformers.small_models import OBJECTIVE, small
from tests.integrations.transformers.trainers import STEPS, EagerTrainer, make_trainer, sequences, train
from zloss.errors import InputError, UnsupportedModelError
from zloss.integrations.moe import attach_router_loss
from zloss.integrations.transformers import RouterZLoss, attach
from zloss.results.run_config import TrainConfig
from zloss.telemetry.trackers import KNOWN, MAIN

FAMILIES = ("GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "OlmoeForCausalLM")
"""Tied, plain, with a softcap, with experts; the sweep of `test_families` has the loss of every class."""
NEAR_ZERO = 5e-5 if torch.__version__.startswith("2.8.") else 2e-5
"""Adam divides a gradient by its own size, so the rounding of one near zero is seen. A step is 1e-3."""


@pytest.mark.parametrize("name", FAMILIES)
def test_five_steps_equal_eager_ce_plus_z(name: str) -> None:
    model = small(name)
    if name == "OlmoeForCausalLM":
        model.config.output_router_logits = True
    twin = copy.deepcopy(model)
    wanted = train(make_trainer(twin, EagerTrainer))
    trainer = make_trainer(model)
    attach(trainer, OBJECTIVE)
    got = train(trainer)
    assert len(got) == len(wanted) == STEPS
    for one, other in zip(got, wanted, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=NEAR_ZERO)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_penalty_that_ends_leaves_cross_entropy_bit_for_bit(resumed: bool, tmp_path: Path) -> None:
    """Steps 1 and 2 are those with Z, from step 3 on they are those of CE alone, as in `zloss train`, also after a resume; λ
    and the Z that was left out are logged."""
    until = 3
    config = TrainConfig(method="standard", coef=OBJECTIVE.coef, coef_until=until)
    planned = [config.coef_at(step) for step in (1, 2, 3, 4)]

    def run(objective: zloss.Objective, folder: Path, **options: Any) -> tuple[list[dict[str, float]], Any]:
        saved = {"save_strategy": "steps", "save_steps": 1} if resumed else {}
        trainer = make_trainer(small(), max_steps=1 if resumed else 4, output_dir=str(folder), **saved)
        attach(trainer, objective, **options)
        logs = train(trainer)
        if resumed:
            trainer = make_trainer(small(), max_steps=4, output_dir=str(folder), **saved)
            attach(trainer, objective, **options)
            with contextlib.redirect_stdout(io.StringIO()):
                trainer.train(resume_from_checkpoint=True)
            logs = [log for log in trainer.state.log_history if "loss" in log]
        return logs, trainer.model

    ended, model = run(OBJECTIVE, tmp_path / "until", coef_until=until)
    scheduled, other = run(
        zloss.StandardZLoss(lambda step: OBJECTIVE.coef if step < until else 0.0, target=OBJECTIVE.target),
        tmp_path / "at",
    )
    assert [log["zloss/coef"] for log in ended] == [log["zloss/coef"] for log in scheduled] == planned
    assert planned[-3:] == [OBJECTIVE.coef, 0.0, 0.0]
    assert ended[-3]["zloss/z"] > 0
    for log in ended[-2:]:
        assert log["zloss/z"] == 0
        assert log["zloss/z_unscaled"] > 0
        assert log["zloss/ce"] == pytest.approx(log["loss"], rel=1e-6)
    assert [log["loss"] for log in ended] == [log["loss"] for log in scheduled]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    if not resumed:
        whole, _ = run(OBJECTIVE, tmp_path / "whole")
        assert [log["loss"] for log in whole][:2] == [log["loss"] for log in ended][:2]
        assert whole[2]["loss"] != ended[2]["loss"]
        off, plain = (
            run(objective, tmp_path / "off", coef_until=1 if z else None)
            for z, objective in ((True, OBJECTIVE), (False, zloss.CrossEntropy()))
        )
        assert all(torch.equal(a, b) for a, b in zip(off[1].parameters(), plain[1].parameters(), strict=True))


def test_a_term_that_is_off_is_not_in_the_unscaled_penalty() -> None:
    logs = []
    for objective in (zloss.FactorizedZLoss(None, 1e-4), zloss.CenteredZLoss(1e-4)):
        trainer = make_trainer(small(), max_steps=2)
        attach(trainer, objective, coef_until=2)
        logs.append([log["zloss/z_unscaled"] for log in train(trainer)])
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    assert min(logs[0]) > 0


def test_a_penalty_that_starts_later_is_no_alert() -> None:
    """Whether Z pulls log Z was read when the trainer was attached, where a schedule may be at 0."""
    late = attach(make_trainer(small()), zloss.StandardZLoss(lambda step: 0.0 if step < 3 else 1e-2))
    never = attach(make_trainer(small()), zloss.CrossEntropy())
    assert (late.monitor.pulled, never.monitor.pulled) == (True, False)


def test_norms_before_clipping_and_parts_of_the_loss_are_logged() -> None:
    trainer = make_trainer(small())
    before: list[float] = []
    after: list[float] = []
    own = trainer.accelerator.clip_grad_norm_

    def norm(parameters: Any) -> float:
        return float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())

    def by_hand(parameters: Any, max_norm: float, *args: Any) -> Any:
        parameters = list(parameters)
        before.append(norm(parameters))
        found = own(parameters, max_norm, *args)
        after.append(norm(parameters))
        return found

    trainer.accelerator.clip_grad_norm_ = by_hand
    attached = attach(trainer, OBJECTIVE, window=1)
    logs = train(trainer)
    assert [log["zloss/grad_norm_preclip"] for log in logs] == pytest.approx(before, rel=1e-5)
    assert max(after) <= 0.1001
    names = "log_z_p999 mu_abs_p99 gain_p99 gain_centered_p99 p_z_999_raw p_z_999_centered entropy"
    for log in logs:
        assert log["zloss/clip_rate"] == 1.0
        assert log["zloss/ce"] + log["zloss/z"] == pytest.approx(log["loss"], rel=1e-4)
        assert all(type(value) in (float, int) for value in log.values())
        assert all(f"zloss/{name}" in log for name in names.split())
    assert attached.handle.calls == 3 + 3 + 1 + 3 + 3


@pytest.mark.parametrize("kept", [50, 2])
@pytest.mark.parametrize("settings", [{"logging_steps": 4}, {"logging_steps": 4, "logging_first_step": True}])
def test_ce_lagged_behind_the_loss_of_the_same_log(
    settings: dict[str, Any], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`zloss/ce` covered the last 50 steps, `loss` those since the last log, which may be more than are kept."""
    monkeypatch.setattr("zloss.integrations.transformers.trainer.DEFAULT_WINDOW", kept)
    # Every sequence has as many tokens, so that a mean over steps is a mean over tokens.
    trainer = make_trainer(small(), max_steps=12, learning_rate=1e-2, per_device_train_batch_size=7, **settings)
    trainer.train_dataset = [{"x": (row["x"].repeat(5))[:16]} for row in sequences()]
    trainer.args.gradient_accumulation_steps = 2
    attach(trainer, OBJECTIVE)
    logs = train(trainer)
    assert [log["zloss/ce"] + log["zloss/z"] for log in logs] == pytest.approx([log["loss"] for log in logs], rel=1e-4)
    assert logs[-1]["zloss/window_steps"] == min(4, kept)
    assert logs[-1]["loss"] < 0.95 * logs[0]["loss"]


@pytest.mark.parametrize("scalars", ["main", ["zloss/ce", "z"]])
def test_a_choice_of_scalars_is_logged_and_alerts_see_all(scalars: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(small())
    attached = attach(trainer, OBJECTIVE, scalars=scalars)
    observed: list[dict[str, float]] = []
    watch = attached.monitor.observe

    def observe(step: int, numbers: dict[str, float]) -> Any:
        observed.append(numbers)
        return watch(step, numbers)

    monkeypatch.setattr(attached.monitor, "observe", observe)
    wanted = {f"zloss/{name}" for name in (MAIN if scalars == "main" else ("ce", "z"))}
    for log in train(trainer):
        assert {name for name in log if name.startswith("zloss/")} == wanted
    assert all("gain_centered_max" in numbers for numbers in observed)
    assert len(observed) == STEPS


def test_every_scalar_of_a_log_has_a_known_name_and_others_are_refused() -> None:
    trainer = make_trainer(small())
    attached = attach(trainer, OBJECTIVE)
    train(trainer)
    assert set(attached.window.scalars()) <= set(KNOWN)
    with pytest.raises(InputError, match=r"unknown scalar: 'log_z_p9999'\. Did you mean 'log_z_p999'"):
        attach(make_trainer(small()), OBJECTIVE, scalars=["ce", "log_z_p9999"])
    wrong: list[Any] = ["ce", None, 5, [1]]
    for scalars in wrong:
        with pytest.raises(InputError, match="`scalars` is expected"):
            attach(make_trainer(small()), OBJECTIVE, scalars=scalars)


def test_evaluation_logs_are_the_models_own() -> None:
    model = small()
    trainer = make_trainer(model)
    trainer.eval_dataset = sequences()
    plain = trainer.evaluate()["eval_loss"]
    attach(trainer, OBJECTIVE)
    again = trainer.evaluate()
    assert again["eval_loss"] == plain
    assert not any(name.startswith("zloss/") for name in again)


def test_remove_gives_the_trainer_its_functions_back() -> None:
    """Its own, or those that had replaced them before."""
    trainer = make_trainer(small())
    before = len(trainer.callback_handler.callbacks)
    attach(trainer, OBJECTIVE).remove()
    assert "log" not in vars(trainer)
    assert "clip_grad_norm_" not in vars(trainer.accelerator)
    assert len(trainer.callback_handler.callbacks) == before
    assert not any(name.startswith("zloss/") for log in train(trainer) for name in log)
    log, clip = (lambda logs, *_: None), (lambda parameters, *_: None)
    trainer.log, trainer.accelerator.clip_grad_norm_ = log, clip
    attach(trainer, OBJECTIVE).remove()
    assert trainer.log is log
    assert trainer.accelerator.clip_grad_norm_ is clip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda trainer: setattr(trainer, "compute_loss_func", lambda *_, **__: 0), "compute_loss_func"),
        (lambda trainer: setattr(trainer.args, "use_liger_kernel", True), "fused_linear_cross_entropy"),
        (lambda trainer: setattr(trainer.args, "loss_type", "dft"), "dft"),
        (lambda trainer: setattr(trainer.args, "_n_gpu", 2), "DataParallel"),
        (lambda trainer: attach(trainer, OBJECTIVE), "already"),
        (lambda trainer: setattr(trainer, "label_smoother", object()), "label_smoothing"),
        (lambda trainer: setattr(trainer.model, "_tp_size", 2), "not supported under tensor parallelism.* has TP = 2"),
    ],
)
def test_settings_that_bypass_the_loss_are_refused(change: Callable[[Any], Any], words: str) -> None:
    trainer = make_trainer(small())
    change(trainer)
    with pytest.raises(InputError, match=words):
        attach(trainer, OBJECTIVE, router=RouterZLoss())


def test_a_model_instead_of_a_trainer_is_refused() -> None:
    with pytest.raises(InputError, match=r"got Linear. For a model, use `apply\(model, objective\)`"):
        attach(torch.nn.Linear(2, 2), OBJECTIVE)


def test_a_bypass_that_no_setting_shows_raises_in_the_first_step() -> None:
    class Elsewhere(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())

    trainer = make_trainer(small(), Elsewhere)
    attach(trainer, OBJECTIVE)
    with pytest.raises(UnsupportedModelError, match="without `labels`"):
        train(trainer)
    trainer = make_trainer(small())
    attach(trainer, OBJECTIVE).handle.remove()
    with pytest.raises(UnsupportedModelError, match="step 1 did not go through zloss"):
        train(trainer)


def test_a_router_z_loss_is_logged_and_leaves_nothing_of_the_last_step() -> None:
    """What it trains: `tests/integrations/test_step_gradient.py`."""
    trainer = make_trainer(small("OlmoeForCausalLM"), max_steps=1)
    attached = attach(trainer, zloss.CrossEntropy(), router=RouterZLoss("token_layer_mean", coef=1.0))
    (log,) = train(trainer)
    assert log["zloss/router_z"] == pytest.approx(attached.handle.router.last.loss.item())
    assert log["zloss/router_z"] > 0
    assert attached.handle.router.step_tokens is None
    with pytest.raises(InputError, match="already"):
        attach_router_loss(trainer.model, coef=1.0, convention="token_layer_mean")


def test_the_state_of_the_alerts_survives_a_resume(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    trainer = make_trainer(small(), **settings)
    attach(trainer, OBJECTIVE)
    train(trainer)
    assert json.loads((tmp_path / "checkpoint-2" / "zloss_alerts.json").read_text())["seen"] == 2
    resumed = make_trainer(small(), **settings)
    attached = attach(resumed, OBJECTIVE)
    with contextlib.redirect_stdout(io.StringIO()):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert attached.monitor.seen == STEPS


def test_an_alert_reaches_the_users_function() -> None:
    got: list[Any] = []
    trainer = make_trainer(small(), max_steps=1)
    attached = attach(trainer, OBJECTIVE, on_alert=got.append)
    attached.window.both = lambda: (attached.window.scalars(), {"ce": float("nan")})
    logs = train(trainer)
    assert [alert.quantity for alert in got] == ["nonfinite"]
    assert "zloss/ce" in logs[0]
    with pytest.raises(InputError, match="on_alert"):
        attach(make_trainer(small()), OBJECTIVE, on_alert="shout")
