"""The parts of distributed tensors on this rank, and how much each counts in a sum over all ranks.

A part that k ranks hold alike counts 1/k on each of them, so that the sum over all ranks counts every entry once: for an
axis of a device mesh with Replicate(), for a plain parameter under DDP, for both together under HSDP or FSDP2 with tensor
parallelism. No tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from zloss.errors import InputError
from zloss.ranks.distributed_tensors import is_dtensor


@dataclass(frozen=True)
class EqualShares:
    """Own parts of the tensors that as many ranks hold alike."""

    share: float
    """By how much an entry counts on this rank: 1/k where k ranks hold it."""
    tensors: list[Tensor]


def own_part(tensor: Tensor) -> Tensor:
    """The entries on this rank, in the storage of the tensor."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = tensor.to_local()
    return local.detach()


def share_of(tensor: Tensor, ranks: int) -> float:
    """1/k for a tensor whose entries k of `ranks` ranks hold alike."""
    if not is_dtensor(tensor):
        return 1 / ranks
    shards = 1
    for axis, place in enumerate(tensor.placements):
        if place.is_partial():
            raise InputError("a parameter or gradient is a DTensor with Partial() placements: sum it over ranks first.")
        shards *= tensor.device_mesh.size(axis) if place.is_shard() else 1
    return shards / ranks


def by_share(tensors: Iterable[Tensor], shares: Iterable[float]) -> list[EqualShares]:
    """Own parts, in classes of equal shares; `shares` are those of the tensors."""
    classes: dict[float, list[Tensor]] = {}
    for tensor, share in zip(tensors, shares, strict=True):
        classes.setdefault(share, []).append(own_part(tensor))
    return [EqualShares(share, own) for share, own in sorted(classes.items())]


def group_of(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group given, or that of all ranks where a tensor is distributed; None on one process and under plain DDP, where
    every rank holds the whole."""
    if group is None and any(is_dtensor(tensor) for tensor in tensors):
        return dist.group.WORLD
    return group
