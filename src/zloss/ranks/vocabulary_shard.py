"""The rows of the vocabulary that this rank holds, and the sums over all ranks that turn them into the whole.

Rank r holds the rows [start, start + rows). A vocabulary on one process is the shard of a group of one, without any
collective.

Axes: C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """Own rows of a vocabulary of `total` rows; `group` is None where this process holds all of them."""

    start: int
    rows: int
    """Own rows inside log Z; 0 on a rank that holds only padding, or nothing."""
    total: int
    """V: rows inside log Z on all ranks."""
    widest: int
    """The largest `rows` of any rank: chunks of tokens are sized by it, alike on all ranks."""
    group: dist.ProcessGroup | None = None

    @property
    def whole(self) -> bool:
        return self.group is None

    @property
    def adds_shared_terms(self) -> bool:
        """Whether this rank adds the terms that every rank knows to a sum over ranks: the first one does."""
        return self.group is None or self.group.rank() == 0

    def own_targets(self, index_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Targets as own rows, and where they are own; 0 in place of the others. No mask where all are own."""
        if self.whole:
            return index_C, None
        own_C = (index_C >= self.start) & (index_C < self.start + self.rows)
        return torch.where(own_C, index_C - self.start, 0), own_C

    def sum_(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.SUM, group=self.group)
        return value

    def start_sum_(self, value: Tensor) -> Any:
        """Begin the sum over ranks in place; what is returned is waited for before `value` is read."""
        assert self.group is not None
        return dist.all_reduce(value, dist.ReduceOp.SUM, group=self.group, async_op=True)

    def max_(self, value: Tensor) -> Tensor:
        """The maximum over ranks, in place."""
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return value

    def mean(self, own_mean: Tensor) -> Tensor:
        """The mean over all rows from the mean over own rows, [X]."""
        if self.whole:
            return own_mean
        own_sum = own_mean * self.rows if self.rows else torch.zeros_like(own_mean)
        return self.sum_(own_sum) / self.total


def whole_vocabulary(rows: int) -> VocabularyShard:
    """All rows on this process."""
    return VocabularyShard(start=0, rows=rows, total=rows, widest=rows)
