"""Norms over many tensors at once: multi-tensor operations, fp64 sums, and no transfer to the host.

A plain fp32 norm of a large CPU tensor adds its squares one after the other, and its relative error grows with the length (1e-2
at 10⁸ entries). Here a large CPU tensor is read as pieces of 2¹⁵ entries, on all threads. Their fp32 norms are good to 1e-7 and
are added in fp64. An accelerator reduces in a tree, so its tensors are read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 2**15
"""Entries of a piece of a CPU tensor."""


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
    """Slices of neighbouring pieces with at most `entries` entries together, which bounds the size of temporaries."""
    start, size = 0, 0
    for i, part in enumerate(parts):
        if i > start and size + part.numel() > entries:
            yield slice(start, i)
            start, size = i, 0
        size += part.numel()
    if start < len(parts):
        yield slice(start, len(parts))


def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """√Σ‖x_i‖₂² in fp64."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    # 16-bit gradients are added up in fp32 at least.
    narrow = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
    dtype = torch.float32 if narrow else None
    stacks, rest = _stacks_and_rest(tensors)
    found = [torch.linalg.vector_norm(part, dim=1, dtype=dtype).double() for part in stacks]
    if rest:
        found.append(torch.stack([value.double() for value in torch._foreach_norm(rest, 2.0, dtype=dtype)]))
    total: Tensor = torch.linalg.vector_norm(torch.cat(found))
    return total


def inf_norm(tensors: Sequence[Tensor]) -> Tensor:
    """max_i |x_i| in fp64."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    if tensors[0].device.type == "cpu":
        # On the CPU torch's ∞-norm uses no vector instructions, and aminmax does.
        ends = [end for tensor in tensors for end in torch.aminmax(tensor)]
        return torch.stack(ends).double().abs().amax()
    return torch.stack([value.double() for value in torch._foreach_norm(list(tensors), float("inf"))]).amax()


def norms(tensors: Sequence[Tensor]) -> Norms:
    """Both norms of the vector that the tensors form together; empty tensors add nothing."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    return Norms(l2_norm(flat), inf_norm(flat))


def _stacks_and_rest(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(views [n, PIECE] of large CPU tensors, the flat rest: their remainders and all other tensors)."""
    stacks, rest = [], []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.device.type != "cpu" or flat.numel() <= PIECE:
            rest.append(flat)
            continue
        whole = flat.numel() // PIECE * PIECE
        stacks.append(flat[:whole].view(-1, PIECE))
        if whole < flat.numel():
            rest.append(flat[whole:])
    return stacks, rest
