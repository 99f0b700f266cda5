"""The batch of a step as a pure function of seed and step.

No loader keeps a position: a resumed run asks for the batch of its next step and gets what the uninterrupted run got.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zloss.text import Blocks


def batch_of(blocks: Blocks, seed: int, step: int, per_step: int) -> Tensor:
    """Indices [per_step] of the blocks of step 1, 2, …: every epoch goes through all blocks once, in an order of its own."""
    first = (step - 1) * per_step
    positions = range(first, first + per_step)
    return torch.tensor([int(_order(blocks.count, seed, p // blocks.count)[p % blocks.count]) for p in positions])


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    """The order of the blocks in one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def gather(blocks: Blocks, index_B: Tensor) -> tuple[Tensor, Tensor]:
    """Input ids [B, size (+1 with BOS)] and target ids [B, size] of the blocks with these indices."""
    position = index_B.unsqueeze(1) * blocks.size + torch.arange(blocks.size)
    inputs, targets = blocks.stream[position], blocks.stream[position + 1]
    if blocks.bos_id is not None:
        inputs = torch.cat([inputs.new_full((len(index_B), 1), blocks.bos_id), inputs], dim=1)
    return inputs, targets
