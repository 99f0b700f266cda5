"""The micro-batches of a step: tokens and dropout are a function of seed, step and micro-batch, the same for all methods.

Several ranks divide the micro-batches of a step among them. Where there are fewer than ranks, they divide its blocks: each
rank has one pass then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zloss.distributed import Job
from zloss.errors import InputError
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


def divides_blocks(config: TrainConfig, job: Job) -> bool:
    """Whether a micro-batch lies on several ranks."""
    return config.accumulate < job.ranks


def micro_batches(config: TrainConfig, data: TrainData, step: int, job: Job | None = None) -> Iterator[MicroBatch]:
    """The micro-batches of one step, of those ranks' own where `job` has several."""
    job = job or Job()
    index_B = batch_of(data.train, config.seed, step, config.blocks_per_step)
    if divides_blocks(config, job):
        own = job.local_range(config.blocks_per_step, 1)
        yield MicroBatch(*gather(data.train, index_B[own.start : own.stop]), seed=_stream_seed(config.seed, step, 0))
        return
    parts = index_B.view(config.accumulate, config.micro_batch)
    for micro in job.local_range(config.accumulate, 1):
        yield MicroBatch(*gather(data.train, parts[micro]), seed=_stream_seed(config.seed, step, micro))


def check_divisible(config: TrainConfig, job: Job) -> None:
    """Refuse a run whose blocks cannot be divided so that it trains as on one process."""
    if config.blocks_per_step < job.ranks:
        raise InputError(
            f"a step has {config.blocks_per_step} blocks (`micro_batch` times `accumulate`), but there are {job.ranks} "
            f"processes: give every process a block."
        )
    if config.moe is not None and divides_blocks(config, job):
        raise InputError(
            "the load-balancing term is one of a whole micro-batch, so a mixture of experts needs at least as many "
            f"micro-batches as processes: `accumulate` is {config.accumulate}, but there are {job.ranks} processes."
        )


def _stream_seed(seed: int, step: int, micro: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {micro}".encode()).digest()[:7], "big")
