"""The batch on which gradients are measured: the first blocks of a text.

Axes: B blocks, N positions, T counted predictions, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.text.blocks import Blocks


@dataclass(frozen=True)
class DiagnosticBatch:
    """Token ids, targets, and which positions are counted."""

    inputs_BN: Tensor
    targets_T: Tensor
    counted: Callable[[Tensor], Tensor] = lambda hidden_BND: hidden_BND
    """Drops the positions whose prediction is not counted."""

    @classmethod
    def of_blocks(cls, blocks: Blocks, count: int, device: torch.device) -> DiagnosticBatch:
        """The first `count` blocks."""
        targets_T = blocks.targets(0, count).reshape(-1)
        return cls(blocks.inputs(0, count).to(device), targets_T.to(device), blocks.counted)

    def flat(self, hidden_BND: Tensor) -> Tensor:
        """Hidden states of the counted predictions, [T, D]."""
        hidden_BND = self.counted(hidden_BND)
        return hidden_BND.reshape(-1, hidden_BND.shape[-1])
