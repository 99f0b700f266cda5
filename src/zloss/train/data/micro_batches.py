"""The micro-batches of a step: tokens and dropout are a function of seed, step and micro-batch, the same for all methods."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zloss.results.train_config import TrainConfig
from zloss.train.data.batch import batch_of, gather
from zloss.train.data.blocks import TrainData


@dataclass(frozen=True)
class MicroBatch:
    """Blocks of one forward and backward pass."""

    inputs_BT: Tensor
    targets_BT: Tensor
    seed: int
    """Seed of its dropout."""


def micro_batches(config: TrainConfig, data: TrainData, step: int) -> Iterator[MicroBatch]:
    """The micro-batches of one step."""
    index_B = batch_of(data.train, config.seed, step, config.blocks_per_step)
    for micro, part in enumerate(index_B.view(config.accumulate, config.micro_batch)):
        yield MicroBatch(*gather(data.train, part), seed=_stream_seed(config.seed, step, micro))


def _stream_seed(seed: int, step: int, micro: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {micro}".encode()).digest()[:7], "big")
