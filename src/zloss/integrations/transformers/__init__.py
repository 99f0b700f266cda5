"""Hugging Face models and trainers: one line, and the training loss is CE + Z through `head_loss`.

    handle = apply(model, zloss.CenteredZLoss(1e-4))      # any loop
    attach(trainer, zloss.CenteredZLoss(1e-4))            # a Trainer or TRL's SFTTrainer, with logging
"""

from __future__ import annotations

from zloss.integrations.transformers.apply import apply
from zloss.integrations.transformers.handle import ZLossHandle

__all__ = ["ZLossHandle", "apply"]
