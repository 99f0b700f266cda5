"""Norms of vectors whose entries lie on several ranks: what a rank reads, and what all readings together say.

On one process they are the norms of `multi_tensor.py`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.optimizer.multi_tensor import l2_norm, norms
from zloss.ranks.own_parts import EqualShares
from zloss.ranks.process_group import gathered


def own_norms(classes: Sequence[EqualShares]) -> Tensor:
    """[√Σ share·‖x‖₂², ‖x‖∞] of own parts, fp64."""
    found = [norms(part.tensors) for part in classes]
    if not found:
        return torch.zeros(2, dtype=torch.float64)
    inf = torch.stack([part.inf for part in found]).amax()
    return torch.stack([_joined(classes, [part.l2 for part in found]), inf])


def own_l2(classes: Sequence[EqualShares]) -> Tensor:
    """√Σ share·‖x‖₂² of own parts, fp64."""
    found = [l2_norm([tensor for tensor in part.tensors if tensor.numel()]) for part in classes]
    return _joined(classes, found) if found else torch.zeros((), dtype=torch.float64)


def norms_over_ranks(everyone: Tensor) -> tuple[Tensor, Tensor]:
    """(‖x‖₂, ‖x‖∞) of the whole from `own_norms` of every rank, [ranks, 2]."""
    return whole_l2(everyone[:, 0]), everyone[:, 1].amax()


def whole_l2(everyone: Tensor) -> Tensor:
    """√Σ_ranks x², and x itself where there is one rank."""
    total: Tensor = everyone[0] if len(everyone) == 1 else torch.linalg.vector_norm(everyone)
    return total


def l2_over_ranks(classes: Sequence[EqualShares], group: ProcessGroup | None) -> Tensor:
    """‖x‖₂ of the whole."""
    return whole_l2(gathered(own_l2(classes).reshape(1), group)[:, 0])


def _joined(classes: Sequence[EqualShares], l2: Sequence[Tensor]) -> Tensor:
    """√Σ share·‖x‖₂² over classes."""
    if len(classes) == 1 and classes[0].share == 1:
        return l2[0]
    weighted = [value.to(l2[0].device) * part.share**0.5 for part, value in zip(classes, l2, strict=True)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(weighted))
    return total
