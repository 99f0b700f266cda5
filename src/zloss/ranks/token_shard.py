"""The tokens that this rank holds of a sequence that is sharded over a group, gathered and given back a chunk at a time.

A chunk has the next few tokens of every rank, so that all ranks give and take equally much. Its hidden states are
all-gathered, its gradients are summed over ranks and scattered to the ranks whose tokens they are: no rank holds the hidden
states of all tokens.

Axes: T tokens of all ranks, C tokens of a chunk, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenShard:
    """Own tokens among those of a group, in the chunk layout of torch along one dimension of `leading`."""

    leading: tuple[int, ...]
    """Shape of the tokens of all ranks, without the width."""
    dim: int
    group: dist.ProcessGroup
    device: torch.device

    @cached_property
    def places(self) -> tuple[Tensor, ...]:
        """Places of each rank's tokens in the flat [T], in their order on that rank."""
        flat = torch.arange(torch.Size(self.leading).numel(), device=self.device).view(self.leading)
        parts = flat.chunk(self.group.size(), dim=self.dim)
        missing = self.group.size() - len(parts)
        return (*(part.reshape(-1) for part in parts), *(flat.new_empty(0) for _ in range(missing)))

    @property
    def own(self) -> Tensor:
        """Places of own tokens."""
        return self.places[self.group.rank()]

    def whole(self, own_flags: Tensor) -> Tensor:
        """[T] of all tokens from a number or a flag of own tokens; one small all-gather."""
        most = max(len(place) for place in self.places)
        everyone, work = _start_gather(own_flags.to(torch.int32).unsqueeze(1), most, self.group)
        work.wait()
        found = torch.zeros(torch.Size(self.leading).numel(), dtype=own_flags.dtype, device=self.device)
        for place, values in zip(self.places, everyone.view(self.group.size(), most), strict=True):
            found[place] = values[: len(place)].to(own_flags.dtype)
        return found

    def chunks(self, longest: int) -> list[TokenChunk]:
        """Chunks of at most about `longest` tokens, at least one of every rank."""
        most = max(len(place) for place in self.places)
        step = max(1, longest // self.group.size())
        return [TokenChunk(self, start, min(step, most - start)) for start in range(0, most, step)]


@dataclass(frozen=True, eq=False)
class TokenChunk:
    """The tokens start … start + step − 1 of every rank that has so many, in rank order."""

    shard: TokenShard
    start: int
    step: int

    @cached_property
    def counts(self) -> list[int]:
        """Tokens of every rank in this chunk."""
        return [min(max(len(place) - self.start, 0), self.step) for place in self.shard.places]

    @cached_property
    def tokens_C(self) -> Tensor:
        """Places in the flat [T]."""
        return torch.cat([place[self.start : self.start + self.step] for place in self.shard.places])

    @property
    def own_rows(self) -> slice:
        """Own tokens of the chunk among all own tokens."""
        return slice(self.start, self.start + self.counts[self.shard.group.rank()])

    @property
    def own_in_chunk(self) -> slice:
        """Own tokens of the chunk among those of the chunk."""
        rank = self.shard.group.rank()
        before = sum(self.counts[:rank])
        return slice(before, before + self.counts[rank])

    @cached_property
    def _padded_rows(self) -> Tensor:
        """Where the tokens of the chunk are among ranks·step rows."""
        device = self.shard.device
        parts = [torch.arange(count, device=device) + rank * self.step for rank, count in enumerate(self.counts)]
        return torch.cat(parts)

    def start_gather(self, own_TD: Tensor) -> Gather:
        """Begin the gathering of the rows of the chunk from every rank's own."""
        everyone, work = _start_gather(own_TD[self.own_rows], self.step, self.shard.group)
        whole = len(everyone) == len(self.tokens_C)
        return Gather(work, everyone, None if whole else self._padded_rows)

    def start_scatter(self, part_CD: Tensor, out_TD: Tensor) -> Scatter:
        """Begin the sum over ranks of [C, D]; own rows of it are in `out_TD` once it was waited for."""
        group = self.shard.group
        padded = part_CD
        if len(part_CD) < group.size() * self.step:
            padded = part_CD.new_zeros(group.size() * self.step, part_CD.shape[1])
            padded[self._padded_rows] = part_CD
        own = part_CD.new_empty(self.step, part_CD.shape[1])
        work = dist.reduce_scatter_tensor(own, padded.contiguous(), group=group, async_op=True)
        return Scatter(work, own, out_TD[self.own_rows], padded)


@dataclass(frozen=True, eq=False)
class Gather:
    """Rows of all ranks that are under way."""

    work: Any
    everyone: Tensor
    rows: Tensor | None
    """Which of them are tokens; None where all are."""

    def wait(self) -> Tensor:
        """[C, D] in rank order."""
        self.work.wait()
        return self.everyone if self.rows is None else self.everyone[self.rows]


@dataclass(frozen=True, eq=False)
class Scatter:
    """A sum over ranks that is under way."""

    work: Any
    own: Tensor
    out: Tensor
    kept: Tensor
    """What is being summed; it must live until the sum is complete."""

    def wait(self) -> None:
        self.work.wait()
        self.out.copy_(self.own[: len(self.out)])


def _start_gather(own: Tensor, rows: int, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """[ranks·rows, X] from up to `rows` own rows of every rank, and what to wait for before it is read."""
    mine = own
    if len(own) < rows:
        mine = own.new_zeros(rows, own.shape[1])
        mine[: len(own)] = own
    everyone = own.new_empty(group.size() * rows, own.shape[1])
    return everyone, dist.all_gather_into_tensor(everyone, mine.contiguous(), group=group, async_op=True)
