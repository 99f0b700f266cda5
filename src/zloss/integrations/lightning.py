"""Lightning: one callback, and the transformers model inside a LightningModule trains with CE + Z and logs its head.

trainer = lightning.Trainer(callbacks=[ZLossCallback(zloss.CenteredZLoss(1e-4))])
"""

from __future__ import annotations

from typing import Any

import torch

from zloss.errors import InputError, MissingDependencyError, UnsupportedModelError, require_version
from zloss.integrations.transformers.apply import ZLossHandle, apply
from zloss.objectives import Objective
from zloss.telemetry.alerts import AlertMonitor, OnAlert, alert_action
from zloss.telemetry.trackers import Scalars, chosen_names, for_trackers
from zloss.telemetry.window import DEFAULT_WINDOW, StepWindow

LEAST_LIGHTNING = "2.2"
try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise MissingDependencyError(f"lightning>={LEAST_LIGHTNING}", "ZLossCallback", "lightning") from error
require_version("lightning", LEAST_LIGHTNING, "ZLossCallback", "lightning")


class ZLossCallback(Callback):
    """Training loss CE + Z during `fit`, `zloss/…` scalars in every logger of the trainer, alerts on changes.

    `model`: the attribute of the LightningModule that holds the transformers model. The scalars are over the last
    `window` optimizer steps and are written every `log_every_n_steps` of the trainer; `scalars="main"` writes ten of
    them, a list of names only those. Gradient norms are those before clipping. The state of the alerts is saved with
    Lightning's checkpoints.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        model: str = "model",
        label_smoothing: float = 0.0,
        window: int = DEFAULT_WINDOW,
        scalars: Scalars = "all",
        on_alert: OnAlert = "log",
    ) -> None:
        self.objective, self.model, self.label_smoothing = objective, model, label_smoothing
        self.window = StepWindow(window, objective.coordinate, across_ranks=True)
        self.monitor = AlertMonitor(pulled=objective.active)
        self.handle: ZLossHandle | None = None
        self._names = chosen_names(scalars)
        self._act = alert_action(on_alert)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        inner = getattr(pl_module, self.model, None)
        if inner is None:
            raise InputError(
                f"{type(pl_module).__name__} has no attribute {self.model!r}: name the one that holds its transformers model, "
                'ZLossCallback(objective, model="...").'
            )
        self.handle = apply(inner, self.objective, label_smoothing=self.label_smoothing)
        self.handle.observers.append(self.window.add)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not getattr(pl_module, self.model).training:
            raise UnsupportedModelError(
                f"the model of {type(pl_module).__name__} is in evaluation mode, so it would train without dropout and "
                "without Z (Lightning leaves models from `from_pretrained` in that mode): call `self.model.train()` in "
                "`configure_model` or `on_train_start`."
            )

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.window.micro_batches:
            raise UnsupportedModelError(
                f"the loss of step {trainer.global_step + 1} did not go through zloss: `training_step` computed it outside "
                f"`self.{self.model}(..., labels=...)`."
            )
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        # A clip rate counts norms above a limit; clipping by value has no such limit.
        by_norm = trainer.gradient_clip_algorithm != "value"
        self.window.end_step(norm, (trainer.gradient_clip_val or None) if by_norm else None)
        if (trainer.global_step + 1) % max(1, trainer.log_every_n_steps):
            return
        found, last = self.window.both()
        pl_module.log_dict(for_trackers(found, self._names))
        for alert in self.monitor.observe(trainer.global_step + 1, last):
            self._act(alert)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def state_dict(self) -> dict[str, Any]:
        return self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.monitor.load_state_dict(state_dict)
