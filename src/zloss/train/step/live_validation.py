"""Cross-entropy on the first validation blocks while a run trains; it changes no number of the run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from zloss.results.train_config import TrainConfig
from zloss.train.data.blocks import TrainData

LIVE_BLOCKS = 8
"""Validation blocks that are read each time, the first ones: a fraction of the work of one step."""
KEY = "valid_ce"
"""The number in the telemetry of a step."""


class LiveValidation:
    """Every `every` steps, and after the last, the cross-entropy of the model as it is; never for `every` 0."""

    def __init__(self, model: nn.Module, config: TrainConfig, data: TrainData, every: int) -> None:
        self._model, self._config, self._data, self._every = model, config, data, every

    def due(self, step: int) -> bool:
        """Whether the model is validated after this step."""
        return bool(self._every) and (step % self._every == 0 or step == self._config.steps)

    @torch.no_grad()
    def telemetry(self, device: torch.device, autocast: AbstractContextManager[Any]) -> dict[str, float | None]:
        """{`valid_ce`: mean cross-entropy in nats per token}."""
        blocks, batch = self._data.valid, self._config.micro_batch
        count = min(LIVE_BLOCKS, blocks.count)
        training, total = self._model.training, 0.0
        self._model.eval()
        try:
            with autocast:
                for start in range(0, count, batch):
                    stop = min(start + batch, count)
                    inputs, targets = blocks.inputs(start, stop).to(device), blocks.targets(start, stop).to(device)
                    total += float(self._model(inputs, targets, targets.numel()).cross_entropy) * (stop - start)
        finally:
            self._model.train(training)
        return {KEY: total / count}
