"""Hugging Face models and trainers: one line, and the training loss is CE + Z through `head_loss`.

handle = apply(model, zloss.CenteredZLoss(1e-4))      # any loop
attach(trainer, zloss.CenteredZLoss(1e-4))            # a Trainer or TRL's SFTTrainer, with logging
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zloss.integrations.moe import RouterZLoss
from zloss.integrations.transformers.apply import apply
from zloss.integrations.transformers.handle import ZLossHandle
from zloss.integrations.transformers.support_table import support

if TYPE_CHECKING:
    from zloss.integrations.transformers.attach_trainer import attach as attach
    from zloss.integrations.transformers.trainer_attachment import TrainerAttachment as TrainerAttachment

__all__ = ["RouterZLoss", "TrainerAttachment", "ZLossHandle", "apply", "attach", "support"]

_HOME = {"attach": "attach_trainer", "TrainerAttachment": "trainer_attachment"}


def __getattr__(name: str) -> Any:
    """`attach` imports the Trainer of transformers, which takes seconds: on first use."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"zloss.integrations.transformers.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
