"""Hugging Face models and trainers: one line, and the training loss is CE + Z through `head_loss`.

handle = apply(model, zloss.CenteredZLoss(1e-4))      # any loop
attach(trainer, zloss.CenteredZLoss(1e-4))            # a Trainer or TRL's SFTTrainer, with logging
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zloss.integrations.moe import RouterZLoss
from zloss.integrations.transformers.apply import ZLossHandle, apply, support

if TYPE_CHECKING:
    from zloss.integrations.transformers.trainer import TrainerAttachment as TrainerAttachment
    from zloss.integrations.transformers.trainer import attach as attach

__all__ = ["RouterZLoss", "TrainerAttachment", "ZLossHandle", "apply", "attach", "support"]


def __getattr__(name: str) -> Any:
    """`attach` imports the Trainer of transformers, which takes seconds: on first use."""
    if name in ("attach", "TrainerAttachment"):
        from zloss.integrations.transformers import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
