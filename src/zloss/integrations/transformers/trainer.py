"""`attach`: a Trainer trains with CE + Z and logs what its head does, in every tracker it has."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zloss.errors import InputError, MissingDependencyError, UnsupportedModelError, require_version
from zloss.head.options import Backend
from zloss.integrations.moe import HookHandle, RouterZLoss
from zloss.integrations.transformers.apply import LEAST_TRANSFORMERS, LEAST_TRL, WITHOUT_Z, ZLossHandle, apply
from zloss.objectives import Objective, off_is_zero
from zloss.optimizer.endpoints import max_safe_scale
from zloss.telemetry.alerts import Alert, AlertMonitor, OnAlert, alert_action, exceeded_levels, logger
from zloss.telemetry.trackers import LEAST, Scalars, chosen_names, for_trackers, require_tracker
from zloss.telemetry.window import DEFAULT_WINDOW, StepWindow
from zloss.text import Blocks
from zloss.train.record import RecordOptions, RunRecorder, record_run

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise MissingDependencyError(f"transformers>={LEAST_TRANSFORMERS}", "`attach`", "audit") from missing

EXPERIMENT_SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "max_steps"),
    *("num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "max_grad_norm"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16", "tf32"),
    *("data_seed", "dataloader_drop_last", "train_sampling_strategy", "average_tokens_across_devices"),
    *("neftune_noise_alpha", "gradient_checkpointing", "torch_compile"),
    # TRL's SFTConfig
    *("max_length", "packing", "packing_strategy", "padding_free", "completion_only_loss", "assistant_only_loss"),
)
"""The arguments of a Trainer that define an experiment: config.json of a recorded run holds them. Paths, logging, evaluation
and hub settings are left out: runs may differ in them and still be a matched pair."""


def attach(
    trainer: Any,
    objective: Objective,
    *,
    on_alert: OnAlert = "log",
    label_smoothing: float = 0.0,
    router: RouterZLoss | None = None,
    window: int | None = None,
    scalars: Scalars = "all",
    backend: Backend = "auto",
    coef_until: int | None = None,
    record: str | os.PathLike[str] | None = None,
    validation: Blocks | Tensor | Sequence[Sequence[int]] | None = None,
    record_options: RecordOptions | None = None,
) -> TrainerAttachment:
    """From now on the trainer minimizes CE + Z and logs `zloss/…` scalars over the steps since its last log.

    `trainer`: a Trainer of transformers or an SFTTrainer of TRL (≥ 1.16), or a subclass of yours, before `train()`; other
    trainers of TRL (GRPO, RLOO, DPO, KTO, ...) are rejected. Every tracker in its
    `report_to` gets the scalars with its other numbers. CE and Z are logged separately as zloss/ce and zloss/z, in nats per
    predicted token; `zloss.statistics` lists the other names. With several processes, they cover the
    tokens of all processes, combined in one collective per log. `scalars="main"` logs ten of them, a list of names only
    those; alerts always see all of them.

    `window`: how many of the last steps the scalars cover. By default these are the steps since the trainer's last log,
    so that zloss/ce + zloss/z and `loss` cover the same steps; of more than 50 steps, everything but these two parts of
    the loss covers the last 50.

    `coef_until`: from this optimizer step on the penalty is off and the loss is CE, bit for bit. A coefficient of the
    objective may also be a function of the step. Steps are the trainer's global ones, counted from 1 as in `zloss train`: 2
    leaves one step with the penalty, and a resumed run continues where it stopped. Either way zloss/coef is λ, and
    zloss/z_unscaled the penalty of the last micro-batch for λ = 1, also while it is off.

    `on_alert`: what to do when a tail changes (`zloss.telemetry.alerts` has the rule, counted in logs): "log" a
    warning, "raise" an error, or a function of the alert.

    `record`: a folder. The run is written into `record/<method>-<λ>-s<seed>/` with its step records and, when training
    ends, the numbers of the trained model on `validation` (see `zloss.record_run`); `zloss compare record` compares
    the methods. `record_options`: what else is measured.

    Settings under which the trainer computes its loss outside the model are rejected. A step that still bypasses the loss
    raises at its end.

    >>> from zloss.integrations.transformers import attach
    >>> attach(trainer, zloss.CenteredZLoss(1e-4))  # doctest: +SKIP
    """
    _refuse_bypasses(trainer)
    if router is not None and trainer.get_tp_size() > 1:
        raise InputError(
            "`router` is not supported under tensor parallelism, and the model of this trainer has TP = "
            f"{trainer.get_tp_size()}: attach without `router`, or train with data parallelism."
        )
    act = alert_action(on_alert)
    names = chosen_names(scalars)
    if coef_until is not None and (isinstance(coef_until, bool) or not isinstance(coef_until, int) or coef_until < 1):
        raise InputError(f"`coef_until` is expected to be an optimizer step ≥ 1, but got {coef_until!r}.")
    if coef_until is not None:
        objective.with_coef(0.0)  # an error if it cannot be switched off
    if record is not None and objective.at(1) is not objective:
        raise InputError(
            "`record` needs one λ for the name of its run: use `coef_until` instead of a function of the step."
        )
    if (record is None) != (validation is None):
        raise InputError(
            "`record` and `validation` belong together: a recorded run is measured on `validation` when it ends, and "
            "nothing else needs it."
        )
    across = StepWindow(
        DEFAULT_WINDOW if window is None else window,
        objective.coordinate,
        across_ranks=True,
        since_restart=window is None,
    )
    start = objective.at(trainer.state.global_step + 1)
    handle = apply(trainer.model, start, label_smoothing=label_smoothing, router=router, backend=backend)
    try:
        recorder = None
        if record is not None and validation is not None:
            settings = _experiment_settings(trainer.args) | {"label_smoothing": label_smoothing}
            if coef_until is not None:
                settings["coef_until"] = coef_until
            if router is not None:
                settings["router"] = {name: str(value) for name, value in asdict(router).items()}
            recorder = record_run(
                record,
                trainer.model,
                objective,
                seed=trainer.args.seed,
                validation=validation,
                clip=trainer.args.max_grad_norm or None,
                settings=settings,
                training_data=_training_data(trainer.train_dataset),
                loop=type(trainer).__name__,
                options=record_options,
            )
        scheduled = coef_until is not None or start is not objective
        schedule = (objective, coef_until) if scheduled else None
        return TrainerAttachment(trainer, handle, across, act, names, recorder, schedule)
    except BaseException:
        handle.remove()
        raise


def _experiment_settings(args: Any) -> dict[str, Any]:
    """The EXPERIMENT_SETTINGS that these arguments have, as JSON values."""
    found = {name: getattr(args, name) for name in EXPERIMENT_SETTINGS if hasattr(args, name)}
    return {name: value.value if isinstance(value, Enum) else value for name, value in found.items()}


def _training_data(dataset: Any) -> dict[str, Any] | None:
    """Fingerprint and length of the training data, if it has them."""
    found: dict[str, Any] = {}
    if isinstance(getattr(dataset, "_fingerprint", None), str):  # a dataset of `datasets`
        found["fingerprint"] = dataset._fingerprint
    if hasattr(dataset, "__len__"):
        found["examples"] = len(dataset)
    return found or None


def _refuse_bypasses(trainer: Any) -> None:
    """Raise for settings under which the trainer does not minimize the loss of the model."""
    if not all(hasattr(trainer, part) for part in ("args", "model", "accelerator", "log")):
        raise InputError(
            f"`trainer` is expected to be a transformers or TRL Trainer, but got {type(trainer).__name__}. For a model, "
            "use `apply(model, objective)`."
        )
    args = trainer.args
    of_trl = next((kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"), None)
    if of_trl is not None:
        require_version("trl", LEAST_TRL, f"`attach` to a {type(trainer).__name__} of TRL", "trl")
    if of_trl not in (None, "SFTTrainer"):
        derived = "" if type(trainer).__name__ == of_trl else f", which derives from TRL's {of_trl}"
        raise UnsupportedModelError(
            f"`trainer` is expected to be a Trainer of transformers or TRL's SFTTrainer, but got {type(trainer).__name__}"
            f"{derived}: its loss is not the cross-entropy that Z is added to; {WITHOUT_Z}"
        )
    chosen_trackers = getattr(args, "report_to", None) or ()
    for name in chosen_trackers if isinstance(chosen_trackers, (list, tuple)) else (chosen_trackers,):
        if name in LEAST:
            require_tracker(name)
    gpus = getattr(args, "n_gpu", 1)
    liger = getattr(args, "liger_kernel_config", None) or {}
    bypasses = {
        "the trainer's label smoother computes the loss from logits, outside the model, so Z would be left out: set "
        "`label_smoothing_factor=0` in its arguments and pass `label_smoothing` to attach instead.": (
            getattr(trainer, "label_smoother", None) is not None
        ),
        "`compute_loss_func` computes the trainer's loss outside the model, so Z would be left out: call "
        "zloss.logits_loss inside that function instead of attaching.": (
            getattr(trainer, "compute_loss_func", None) is not None
        ),
        '`loss_type="dft"` weights every token by its probability, which it takes from the loss; with Z in the loss '
        'that weight would be wrong: use `loss_type="nll"`.': getattr(args, "loss_type", None) == "dft",
        "Liger's fused cross-entropy would compute the loss instead: pass "
        '`liger_kernel_config={"fused_linear_cross_entropy": False}` with `use_liger_kernel=True`.': (
            getattr(args, "use_liger_kernel", False) and liger.get("fused_linear_cross_entropy", True)
        ),
        f"this trainer would run nn.DataParallel over {gpus} GPUs, whose copies of the model share one handle: start it "
        "with `torchrun` or `accelerate launch`, one process per GPU.": gpus > 1,
    }
    for sentence, applies in bypasses.items():
        if applies:
            raise InputError(sentence)


class TrainerAttachment(TrainerCallback, HookHandle):
    """A trainer whose model has a Z-loss and whose logs have its telemetry; `remove()` undoes it.

    `handle` is the handle of the model, `window` holds the last steps, `monitor` the alerts; `levels` are the thresholds of the
    decision map that the first logged step exceeded. `recorder` writes the run folder, or is None.
    """

    def __init__(
        self,
        trainer: Any,
        handle: ZLossHandle,
        window: StepWindow,
        act: Callable[[Alert], None],
        names: frozenset[str],
        recorder: RunRecorder | None,
        schedule: tuple[Objective, int | None] | None,
    ) -> None:
        self._schedule = schedule
        """The objective and the step from which on it is off; None if it is the same at every step."""
        self.handle, self.window, self.recorder = handle, window, recorder
        self._names = names
        self.monitor = AlertMonitor(pulled=schedule is not None or handle.options.objective.active)
        self.levels: dict[str, tuple[float, float]] | None = None
        self._act = act
        self._trainer = trainer
        self._grad_norm: Tensor | float | None = None
        self._max_norm: float | None = None
        HookHandle.__init__(self)
        self._trainer_log = self.replace(trainer, "log", self._log)
        self._trainer_samples = self.replace(trainer, "get_batch_samples", self._batch_samples)
        self._trainer_clip = self.replace(trainer.accelerator, "clip_grad_norm_", self._clip)
        trainer.add_callback(self)
        handle.observers.append(window.add)
        if recorder is not None:
            handle.observers.append(recorder.micro_batch)

    def remove(self) -> None:
        """Restore the functions of the trainer and remove the hooks from the model."""
        super().remove()
        self._trainer.remove_callback(self)
        self.handle.remove()
        if self.recorder is not None:
            self.recorder.close()

    def scalars(self) -> dict[str, float]:
        """The scalars of the next log of a training step, by name; with several processes, every process must call it."""
        return self._named(self.window.scalars())

    def _named(self, found: dict[str, float]) -> dict[str, float]:
        if self.handle.router is not None and self.handle.router.last is not None:
            found["router_z"] = float(self.handle.router.last.loss.detach())
        if self._schedule is not None and self.handle.last is not None:
            coefs, stats = self.handle.options.objective.coefficients(), self.handle.last.stats
            penalty = self._schedule[0].with_coef(1.0).source(stats)[0][stats.valid]
            found |= {
                "coef": max((float(off_is_zero(coef)) for coef in coefs.values()), default=0.0),
                "z_unscaled": float(penalty.mean()),
            }
        return for_trackers(found, self._names)

    # What replaces functions of the trainer.

    def _batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of the next step. With a router Z-loss their tokens are counted over all processes.

        Like `Trainer.compute_loss` and `training_step`: losses that the model divides by `items`, the predicted tokens of
        the step, are added up over micro-batches, and over processes too with `average_tokens_across_devices`. Other
        losses are averaged over micro-batches, and gradients are averaged over processes.
        """
        samples, items = self._trainer_samples(*args, **kwargs)
        if self._schedule is not None:
            (objective, until), step = self._schedule, self._trainer.state.global_step + 1
            current = objective.at(step) if until is None or step < until else objective.with_coef(0.0)
            self.handle.options = replace(self.handle.options, objective=current)
        router, trainer = self.handle.router, self._trainer
        if router is not None:
            copies = trainer.get_cp_size() * trainer.get_sp_size()
            tokens = torch.tensor(sum(router.routed_tokens(batch) for batch in samples), device=trainer.args.device)
            tokens = (trainer.accelerator.gather(tokens.double()).sum() / copies).clamp_min(1)
            averaged_over = 1 if items is not None else len(samples)
            if items is None or not trainer.args.average_tokens_across_devices:
                averaged_over *= trainer.accelerator.num_processes
            router.step_tokens = tokens / averaged_over
        return samples, items

    def _clip(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        norm = self._trainer_clip(parameters, max_norm, *args, **kwargs)
        # With clipping off, the trainer calls it a second time with an infinite limit; both return the norm before.
        if self._grad_norm is None:
            self._grad_norm, self._max_norm = norm, None if math.isinf(max_norm) else max_norm
        return norm

    def _log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" not in logs:
            return self._trainer_log(logs, *args, **kwargs)
        found, last = self.window.both()
        numbers = last | self._recorded_numbers()
        if self.levels is None and self.handle.last is not None:
            self.levels = exceeded_levels(numbers, self.handle.last.stats.vocab)
            for name, (value, limit) in self.levels.items():
                logger.info("from the start %s is %.3g, above the decision map's %.3g", name, value, limit)
        alerts = self.monitor.observe(self._trainer.state.global_step, numbers)
        self.window.restart()
        done = self._trainer_log(logs | self._named(found), *args, **kwargs)
        for alert in alerts:  # after the log, so that an alert that raises leaves its numbers in the trackers
            self._act(alert)
        return done

    def _recorded_numbers(self) -> dict[str, float]:
        """What only the recorder measures: Adam's second moments and the fp16 margin of the last step."""
        if self.recorder is None or not self.recorder.records:
            return {}
        record = self.recorder.records[-1]
        margin = max_safe_scale(record.grad_inf)
        found = {"fp16_margin": margin} if math.isfinite(margin) else {}  # infinite for a gradient of zeros
        if record.adam is not None:
            found["adam_v_max"] = record.adam.v_inf
        return found

    # What the trainer calls as a callback.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.window.restart()
        file = _alerts_file(args, state)
        if state.global_step and file.is_file():  # without it, the alerts start from scratch
            self.monitor.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
        if self.recorder is not None:
            self.recorder.start(state.global_step, kwargs.get("optimizer"))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between clipping and the optimizer's step: the recorder reads the gradients."""
        if self.recorder is None or not self.window.micro_batches:
            return
        factor = 1.0
        if self._grad_norm is not None and self._max_norm is not None:
            # The factor of torch.nn.utils.clip_grad_norm_.
            factor = min(1.0, self._max_norm / (float(self._grad_norm) + 1e-6))
        self.recorder.begin_step(clipped_by=factor)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.window.micro_batches:
            raise UnsupportedModelError(
                f"the loss of step {state.global_step} did not go through zloss: something computed it outside the model "
                "(an overridden `compute_loss`, a patched forward, or `handle.remove()`)."
            )
        self.window.end_step(self._grad_norm, self._max_norm)
        self._grad_norm = None
        if self.recorder is not None:
            self.recorder.end_step(updated=not self._trainer.accelerator.optimizer_step_was_skipped)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        file = _alerts_file(args, state)
        if state.is_world_process_zero and file.parent.is_dir():
            file.write_text(json.dumps(self.monitor.state_dict()), encoding="utf-8")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.handle.router is not None:
            self.handle.router.step_tokens = None
        if self.recorder is not None:
            self.recorder.finish()


def _alerts_file(args: Any, state: Any) -> Path:
    """The state of the alerts, inside a checkpoint of the trainer."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "zloss_alerts.json"
