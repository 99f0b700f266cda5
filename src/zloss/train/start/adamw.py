"""AdamW as a run configures it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zloss.results.train_config import TrainConfig
from zloss.train.start.optimizer_state import load_adam_state


def make_adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all trained parameters, with decoupled decay on those that decay; its state is fresh or a given one."""
    optimizer = torch.optim.AdamW(
        decay_groups(model, config), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps
    )
    if config.optimizer_state is not None:
        load_adam_state(optimizer, model, config.optimizer_state)
    return optimizer


def decay_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay: it is on matrices and tables, or on everything (`config.decay`)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trained if config.decay == "all" or p.dim() >= 2]
    rest = [p for p in trained if config.decay != "all" and p.dim() < 2]
    groups = ({"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
