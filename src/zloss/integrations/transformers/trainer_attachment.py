"""`attach`: a Trainer trains with CE + Z and logs what its head does, in every tracker it has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from transformers import TrainerCallback

from zloss.errors import UnsupportedModelError
from zloss.integrations.moe import RouterZLoss
from zloss.integrations.transformers.apply import apply
from zloss.integrations.transformers.handle import ZLossHandle
from zloss.integrations.transformers.trainer_checks import refuse_bypasses
from zloss.source.objective import Objective
from zloss.telemetry.alert_action import OnAlert, alert_action, logger
from zloss.telemetry.alerts import Alert, AlertMonitor
from zloss.telemetry.levels import exceeded_levels
from zloss.telemetry.window import StepWindow
from zloss.transport.backends.choice import Backend

PREFIX = "zloss/"
DEFAULT_WINDOW = 50
STATE_FILE = "zloss_alerts.json"
"""Beside a checkpoint of the trainer: the state of the alerts."""


class TrainerAttachment:
    """A trainer whose model has a Z-loss and whose logs have its telemetry; `remove()` takes everything back.

    `handle` is that of the model, `window` holds the last steps, `monitor` the alerts; `levels` are the thresholds of the
    decision map that the first logged step was above.
    """

    def __init__(self, trainer: Any, handle: ZLossHandle, window: StepWindow, on_alert: OnAlert) -> None:
        self.handle, self.window, self.monitor = handle, window, AlertMonitor()
        self.levels: dict[str, tuple[float, float]] | None = None
        self._act = alert_action(on_alert)
        self._trainer = trainer
        self._grad_norm: Tensor | float | None = None
        self._max_norm: float | None = None
        self._callback = _StepWatch(self)
        self._own_log, self._own_clip = trainer.log, trainer.accelerator.clip_grad_norm_
        trainer.log = self._log
        trainer.accelerator.clip_grad_norm_ = self._clip
        trainer.add_callback(self._callback)
        handle.observers.append(window.add)

    def remove(self) -> None:
        """Give the trainer its own functions back and take the hooks off the model."""
        vars(self._trainer).pop("log", None)
        vars(self._trainer.accelerator).pop("clip_grad_norm_", None)
        self._trainer.remove_callback(self._callback)
        self.handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def scalars(self) -> dict[str, float]:
        """What the next log of a training step gets, by name."""
        found = self.window.scalars()
        if self.handle.router is not None and self.handle.router.last is not None:
            found["router_z"] = float(self.handle.router.last.loss.detach())
        return {f"{PREFIX}{name}": value for name, value in found.items() if math.isfinite(value)}

    def begin_step(self) -> None:
        """Called before every optimizer step. A Trainer that divides token losses by the tokens of all micro-batches adds
        everything else undivided, so the router's mean is divided by their number here."""
        if self.handle.router is not None and self._trainer.model_accepts_loss_kwargs:
            self.handle.router.micro_batches = self._trainer.current_gradient_accumulation_steps

    def end_step(self, step: int) -> None:
        """Called after every optimizer step."""
        if not self.window.micro_batches:
            raise UnsupportedModelError(
                f"the loss of step {step} did not go through zloss: something computed it outside the model "
                "(an overridden `compute_loss`, a patched forward, or `handle.remove()`)."
            )
        self.window.end_step(self._grad_norm, self._max_norm)
        self._grad_norm = None

    def _log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" not in logs:
            return self._own_log(logs, *args, **kwargs)
        alerts = self._watch(self.window.last_step())
        done = self._own_log(logs | self.scalars(), *args, **kwargs)
        for alert in alerts:  # after the log, so that an alert that raises leaves its numbers in the trackers
            self._act(alert)
        return done

    def _watch(self, numbers: dict[str, float]) -> list[Alert]:
        if self.levels is None and self.handle.last is not None:
            self.levels = exceeded_levels(numbers, self.handle.last.stats.vocab)
            for name, (value, limit) in self.levels.items():
                logger.info("from the start %s is %.3g, above the decision map's %.3g", name, value, limit)
        return self.monitor.observe(self._trainer.state.global_step, numbers)

    def save(self, folder: Path) -> None:
        """The state of the alerts, beside a checkpoint."""
        if folder.is_dir():
            (folder / STATE_FILE).write_text(json.dumps(self.monitor.state_dict()), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint; one without a state of alerts starts them anew."""
        if (folder / STATE_FILE).is_file():
            self.monitor.load_state_dict(json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))

    def _clip(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        norm = self._own_clip(parameters, max_norm, *args, **kwargs)
        # The trainer calls it a second time with an infinite limit where clipping is off; both return the norm before.
        if self._grad_norm is None:
            self._grad_norm, self._max_norm = norm, None if math.isinf(max_norm) else max_norm
        return norm


class _StepWatch(TrainerCallback):
    """Tells the attachment of steps and checkpoints."""

    def __init__(self, attachment: TrainerAttachment) -> None:
        self._attachment = attachment

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            self._attachment.load(_checkpoint(args, state))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._attachment.save(_checkpoint(args, state))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attachment.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attachment.end_step(state.global_step)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def attach(
    trainer: Any,
    objective: Objective,
    *,
    on_alert: OnAlert = "log",
    label_smoothing: float = 0.0,
    router: RouterZLoss | None = None,
    window: int = DEFAULT_WINDOW,
    backend: Backend = "auto",
) -> TrainerAttachment:
    """From now on the trainer minimises CE + Z and logs `zloss/…` scalars over its last `window` steps.

    `trainer`: a Trainer of transformers or an SFTTrainer of TRL (≥ 1.15), before `train()`. Every tracker in its
    `report_to` gets the scalars with its other numbers. CE and Z stand apart as zloss/ce and zloss/z, in nats per
    predicted token; `zloss.source.summary` lists the other names. On several processes they are of the tokens of the
    process that logs.

    `on_alert`: what is done when a tail changes (`zloss.telemetry.alerts` has the rule, counted in logs): "log" a
    warning, "raise" an error, or a function of the alert.

    Refused: settings under which the trainer computes its loss outside the model. A step that bypassed the loss all the
    same raises at its end.

    >>> from zloss.integrations.transformers import attach
    >>> attach(trainer, zloss.CenteredZLoss(1e-4))  # doctest: +SKIP
    """
    refuse_bypasses(trainer)
    alert_action(on_alert)  # checks itself
    handle = apply(
        trainer.model,
        objective,
        label_smoothing=label_smoothing,
        router=router,
        backend=backend,
    )
    return TrainerAttachment(trainer, handle, StepWindow(window, objective.coordinate), on_alert)
