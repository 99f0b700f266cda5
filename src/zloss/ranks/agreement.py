"""What the ranks of a group must agree on before their first collective, and what each of them has.

A rank that disagrees would wait for a collective the others never start, or add numbers of other tokens.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zloss.errors import InputError
from zloss.ranks.process_group import gathered


@dataclass(frozen=True)
class Shared:
    """One fact that every rank of a group must have alike."""

    value: int
    difference: str
    """The error for ranks that differ, without its first words "the ranks of the group"."""


def exchange(own: list[int], shared: list[Shared], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """`own` of every rank, in rank order, after all ranks agreed on `shared`. One all-gather of a few integers."""
    mine = torch.tensor([*own, *(fact.value for fact in shared)], dtype=torch.int64, device=device)
    table = gathered(mine, group).tolist()
    for column, fact in enumerate(shared, start=len(own)):
        if len({line[column] for line in table}) > 1:
            raise InputError(f"the ranks of the group {fact.difference}")
    return [line[: len(own)] for line in table]


def fingerprint(value: object) -> int:
    """A number that differs where `repr(value)` differs, but for one case in four billion."""
    return zlib.crc32(repr(value).encode())


def tokens_fingerprint(index: Tensor) -> int:
    """A number that depends on every entry of an integer tensor and on its place."""
    flat = index.reshape(-1).to(torch.int64)
    places = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.int64)
    return int(((flat + 1) * (places * 2654435761 % 2147483647)).sum())
