"""The processes of one job: those that `torchrun` or `accelerate launch` started, or this one alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from zloss.errors import ZlossError

TIMEOUT_VARIABLE = "ZLOSS_RANK_TIMEOUT"
"""Environment variable: seconds after which a rank that waits for another one gives up."""
TIMEOUT_SECONDS = 1800.0


class LostRankError(ZlossError, RuntimeError):
    """Another process of the job ended, or did not answer in time."""


@dataclass(frozen=True)
class Job:
    """This process among those of its job."""

    rank: int = 0
    ranks: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def own_range(self, count: int, batch: int) -> range:
        """The own ones of `count` blocks: contiguous, every block on one rank, cut between batches of `batch`."""
        batches = -(-count // batch)
        cuts = [min(count, batch * (batches * rank // self.ranks)) for rank in range(self.ranks + 1)]
        return range(cuts[self.rank], cuts[self.rank + 1])

    def gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks in rank order on the first rank; nothing on the others."""
        if self.ranks == 1:
            return [payload]
        received: list[bytes | None] | None = [None] * self.ranks if self.first else None
        try:
            dist.gather_object(payload, received)
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self.rank} of {self.ranks} lost another process of the job ({str(error).splitlines()[0]}): "
                "what each rank has finished is saved, and the same command goes on with it (--resume)."
            ) from error
        return [] if received is None else [part for part in received if part is not None]


@contextmanager
def open_job() -> Iterator[Job]:
    """The job of this process: its group is opened here where a launcher started several processes."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 or "RANK" not in os.environ:
        yield Job()
        return
    opened = not dist.is_initialized()
    if opened:
        seconds = float(os.environ.get(TIMEOUT_VARIABLE, TIMEOUT_SECONDS))
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    try:
        yield Job(dist.get_rank(), ranks)
    finally:
        if opened:
            dist.destroy_process_group()
