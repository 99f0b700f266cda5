"""A model, its head and its text on one device, and what its head receives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zloss.console.progress import Progress
from zloss.models.checkpoint import Checkpoint
from zloss.models.hidden_states import hidden_states
from zloss.models.output_head import OutputHead
from zloss.text.blocks import Blocks


@dataclass(frozen=True)
class AuditedHead:
    """A model, its head and its text, on one device."""

    checkpoint: Checkpoint
    head: OutputHead
    blocks: Blocks
    target: float
    """c = log V of the head."""

    def first(self, count: int) -> Blocks:
        """The first `count` blocks of the text."""
        count = min(count, self.blocks.count)
        return replace(self.blocks, stream=self.blocks.stream[: count * self.blocks.size + 1], count=count)


@torch.no_grad()
def head_inputs(model: AuditedHead, progress: Progress) -> Tensor:
    """Hidden states [T, D] of every prediction, one block after the other."""
    parts = []
    with (
        hidden_states(model.checkpoint, model.head) as hidden_of,
        progress.step("hidden states", model.blocks.predictions) as step,
    ):
        for block in range(model.blocks.count):
            parts.append(model.blocks.counted(hidden_of(model.blocks.inputs(block, block + 1))).flatten(0, 1))
            step.advance(model.blocks.size)
    return torch.cat(parts)
