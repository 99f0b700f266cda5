"""A Trainer to which a Z-loss is attached: what it logs at every step, and what is taken back with `remove()`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from zloss.errors import MissingDependencyError, UnsupportedModelError
from zloss.integrations.transformers.apply import LEAST_TRANSFORMERS
from zloss.integrations.transformers.handle import ZLossHandle
from zloss.optimizer.endpoints import max_safe_scale
from zloss.telemetry.alerts import Alert, AlertMonitor, OnAlert, alert_action, exceeded_levels, logger
from zloss.telemetry.trackers import for_trackers
from zloss.telemetry.window import StepWindow
from zloss.train.record.run_recorder import RunRecorder

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise MissingDependencyError(f"transformers>={LEAST_TRANSFORMERS}", "`attach`", "audit") from missing

STATE_FILE = "zloss_alerts.json"
"""Beside a checkpoint of the trainer: the state of the alerts."""


class TrainerAttachment:
    """A trainer whose model has a Z-loss and whose logs have its telemetry; `remove()` takes everything back.

    `handle` is that of the model, `window` holds the last steps, `monitor` the alerts; `levels` are the thresholds of the
    decision map that the first logged step was above. `recorder` writes the run folder, or is None.
    """

    def __init__(
        self,
        trainer: Any,
        handle: ZLossHandle,
        window: StepWindow,
        on_alert: OnAlert,
        names: frozenset[str],
        recorder: RunRecorder | None = None,
    ) -> None:
        self.handle, self.window, self.recorder = handle, window, recorder
        self._names = names
        self.monitor = AlertMonitor(pulled=handle.settings.objective.active)
        self.levels: dict[str, tuple[float, float]] | None = None
        self._act = alert_action(on_alert)
        self._trainer = trainer
        self._grad_norm: Tensor | float | None = None
        self._max_norm: float | None = None
        self._callback = _StepWatch(self)
        self._own_log, self._own_clip = trainer.log, trainer.accelerator.clip_grad_norm_
        self._own_batches = trainer.get_batch_samples
        places = ((trainer, "log"), (trainer, "get_batch_samples"), (trainer.accelerator, "clip_grad_norm_"))
        self._replaced = [(holder, name, vars(holder).get(name)) for holder, name in places]
        trainer.log = self._log
        trainer.get_batch_samples = self._batch_samples
        trainer.accelerator.clip_grad_norm_ = self._clip
        trainer.add_callback(self._callback)
        handle.observers.append(window.add)
        if recorder is not None:
            handle.observers.append(recorder.micro_batch)

    def remove(self) -> None:
        """Give the trainer its functions back as they were before, and take the hooks off the model."""
        for holder, name, before in self._replaced:
            if before is None:
                vars(holder).pop(name, None)
            else:
                setattr(holder, name, before)
        self._trainer.remove_callback(self._callback)
        self.handle.remove()
        if self.recorder is not None:
            self.recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def scalars(self) -> dict[str, float]:
        """What the next log of a training step gets, by name; on several processes all of them have to ask."""
        return self._named(self.window.scalars())

    def _named(self, found: dict[str, float]) -> dict[str, float]:
        if self.handle.router is not None and self.handle.router.last is not None:
            found["router_z"] = float(self.handle.router.last.loss.detach())
        return for_trackers(found, self._names)

    def _batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of the next step. With a router Z-loss their tokens are counted over all processes.

        Like `Trainer.compute_loss` and `training_step`: losses that the model divides by `items`, the predicted tokens of
        the step, are added up over micro-batches, and over processes too with `average_tokens_across_devices`. Other
        losses are averaged over micro-batches, and gradients are averaged over processes.
        """
        samples, items = self._own_batches(*args, **kwargs)
        router, trainer = self.handle.router, self._trainer
        if router is not None:
            copies = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
            tokens = torch.tensor(sum(router.routed_tokens(batch) for batch in samples), device=trainer.args.device)
            tokens = (trainer.accelerator.gather(tokens.double()).sum() / copies).clamp_min(1)
            averaged_over = 1 if items is not None else len(samples)
            if items is None or not trainer.args.average_tokens_across_devices:
                averaged_over *= trainer.accelerator.num_processes // trainer.get_tp_size()
            router.step_tokens = tokens / averaged_over
        return samples, items

    def before_update(self) -> None:
        """Called between clipping and the optimizer's step: the recorder reads the gradients."""
        if self.recorder is None or not self.window.micro_batches:
            return
        factor = 1.0
        if self._grad_norm is not None and self._max_norm is not None:
            # The factor of torch.nn.utils.clip_grad_norm_.
            factor = min(1.0, self._max_norm / (float(self._grad_norm) + 1e-6))
        self.recorder.begin_step(clipped_by=factor)

    def end_step(self, step: int) -> None:
        """Called after every optimizer step."""
        if not self.window.micro_batches:
            raise UnsupportedModelError(
                f"the loss of step {step} did not go through zloss: something computed it outside the model "
                "(an overridden `compute_loss`, a patched forward, or `handle.remove()`)."
            )
        self.window.end_step(self._grad_norm, self._max_norm)
        self._grad_norm = None
        if self.recorder is not None:
            self.recorder.end_step(updated=not self._trainer.accelerator.optimizer_step_was_skipped)

    def _log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" not in logs:
            return self._own_log(logs, *args, **kwargs)
        found, last = self.window.both()
        alerts = self._watch(last | self._recorded_numbers())
        self.window.restart()
        done = self._own_log(logs | self._named(found), *args, **kwargs)
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
        self._attachment.window.restart()
        if state.global_step:
            self._attachment.load(_checkpoint(args, state))
        if self._attachment.recorder is not None:
            self._attachment.recorder.start(state.global_step, kwargs.get("optimizer"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._attachment.handle.router is not None:
            self._attachment.handle.router.step_tokens = None
        if self._attachment.recorder is not None:
            self._attachment.recorder.finish()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attachment.before_update()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._attachment.save(_checkpoint(args, state))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attachment.end_step(state.global_step)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
