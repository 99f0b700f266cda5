"""Norms over many tensors at once: multi-tensor operations, fp64 sums, and no transfer to the host.

A plain fp32 norm of a large tensor on the CPU adds its squares up one after the other and loses digits with its length
(1e-2 relative at 10⁸ entries). Here CPU tensors are cut into pieces of 2¹⁵ entries, whose fp32 norms are good to 1e-7 and
are added in fp64; on an accelerator the reduction is a tree and whole tensors stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 2**15
"""Entries of a CPU piece: small enough to stay in the cache between the two norms."""


@dataclass(frozen=True)
class Norms:
    """‖x‖₂ (fp64) and ‖x‖∞ (fp64) of all tensors taken as one vector, as 0-d tensors; a NaN anywhere makes both NaN."""

    l2: Tensor
    inf: Tensor


def pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The entries of all tensors as flat views: CPU tensors cut up, others whole."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    return [piece for x in flat for piece in (torch.split(x, PIECE) if x.device.type == "cpu" else (x,))]


def buckets(parts: Sequence[Tensor], entries: int = 2**24) -> Iterator[slice]:
    """Runs of pieces with at most `entries` entries together, so that temporaries stay small beside the model."""
    start, size = 0, 0
    for i, part in enumerate(parts):
        if i > start and size + part.numel() > entries:
            yield slice(start, i)
            start, size = i, 0
        size += part.numel()
    if start < len(parts):
        yield slice(start, len(parts))


def l2_norm(parts: Sequence[Tensor]) -> Tensor:
    """√Σ‖x_i‖₂² in fp64."""
    total: Tensor = torch.linalg.vector_norm(_piece_norms(parts, 2.0))
    return total


def norms(parts: Sequence[Tensor]) -> Norms:
    """Both norms of the vector that the pieces form together."""
    return Norms(l2_norm(parts), inf_norm(parts))


def inf_norm(parts: Sequence[Tensor]) -> Tensor:
    """max_i |x_i|."""
    if parts and parts[0].device.type == "cpu":
        # The CPU's own ∞-norm does not use vector instructions; the smallest and the largest entry do.
        ends = [end for part in parts for end in torch.aminmax(part)]
        return torch.stack(ends).double().abs().amax()
    found = _piece_norms(parts, float("inf"))
    return found.amax() if parts else found.sum()


def _piece_norms(parts: Sequence[Tensor], order: float) -> Tensor:
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    # 16-bit gradients are added up in fp32 at least.
    narrow = any(part.dtype in (torch.bfloat16, torch.float16) for part in parts)
    found = torch._foreach_norm(list(parts), order, dtype=torch.float32 if narrow else None)
    return torch.stack([value.double() for value in found])
