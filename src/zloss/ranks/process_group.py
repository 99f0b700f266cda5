"""The group of all processes, where one is initialised, and numbers gathered over a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def default_group() -> dist.ProcessGroup | None:
    """The group of all processes; None where none is initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def world_size() -> int:
    """Processes of the default group; 1 without one."""
    group = default_group()
    return 1 if group is None else group.size()


def first_rank() -> bool:
    """Whether this process is the one that writes what all of them know."""
    group = default_group()
    return group is None or group.rank() == 0


def gathered(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The numbers [X] of every rank in rank order, [ranks, X]; one row without a group."""
    if group is None:
        return numbers.unsqueeze(0)
    everyone = [torch.empty_like(numbers) for _ in range(group.size())]
    dist.all_gather(everyone, numbers.contiguous(), group=group)
    return torch.stack(everyone)
