"""The model of a run with its loss: dense, or with experts and their router loss."""

from __future__ import annotations

from zloss.models.checkpoint import Checkpoint
from zloss.results.train_config import TrainConfig
from zloss.train.data.blocks import TrainData
from zloss.train.moe.loss import MoeLossModel
from zloss.train.step.loss_model import LossModel
from zloss.train.step.objective import run_objective


def run_loss(config: TrainConfig, checkpoint: Checkpoint, data: TrainData) -> LossModel | MoeLossModel:
    """Token ids and targets to the loss that the run's configuration states."""
    objective = run_objective(config)
    if config.moe is None:
        return LossModel(checkpoint, objective, config.head, data.train.counted)
    return MoeLossModel(checkpoint, objective, config.head, data.train.counted, config.moe)
