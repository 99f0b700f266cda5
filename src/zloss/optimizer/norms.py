"""Norms over many tensors at once, on one process or across ranks: multi-tensor operations, fp64 sums, no transfer to the host.

A plain fp32 norm of a large CPU tensor sums its squares sequentially, and its relative error grows with the length (1e-2
at 10⁸ entries). Here a large CPU tensor is read as pieces of 2¹⁵ entries, on all threads. Their fp32 norms are accurate to
1e-7 and are combined in fp64. An accelerator reduces in a tree, so its tensors are read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import LocalParts, gathered

PIECE = 2**15
"""Entries of a piece of a CPU tensor."""


@dataclass(frozen=True)
class Norms:
    """‖x‖₂ and ‖x‖∞ of all tensors taken as one vector, 0-d in fp64; a NaN anywhere makes both NaN."""

    l2: Tensor
    inf: Tensor


def norms(tensors: Sequence[Tensor]) -> Norms:
    """Both norms of all tensors taken as one vector; empty tensors are ignored."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    return Norms(l2_norm(flat), inf_norm(flat))


def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """√Σ‖x_i‖₂² in fp64."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    # 16-bit gradients are summed in fp32 at least.
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
        # On the CPU, aminmax is vectorized and torch's ∞-norm is not.
        ends = [end for tensor in tensors for end in torch.aminmax(tensor)]
        return torch.stack(ends).double().abs().amax()
    return torch.stack([value.double() for value in torch._foreach_norm(list(tensors), float("inf"))]).amax()


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


def pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The entries of all tensors as flat views: CPU tensors in pieces, others whole."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    return [piece for x in flat for piece in (torch.split(x, PIECE) if x.device.type == "cpu" else (x,))]


def buckets(parts: Sequence[Tensor], entries: int = 2**24) -> Iterator[slice]:
    """Slices of consecutive pieces with at most `entries` entries in total, which bounds the size of temporaries."""
    start, size = 0, 0
    for i, part in enumerate(parts):
        if i > start and size + part.numel() > entries:
            yield slice(start, i)
            start, size = i, 0
        size += part.numel()
    if start < len(parts):
        yield slice(start, len(parts))


def local_norms(classes: Sequence[LocalParts]) -> Tensor:
    """[√Σ share·‖x‖₂², ‖x‖∞] of the parts on this rank, fp64."""
    found = [norms(part.tensors) for part in classes]
    if not found:
        return torch.zeros(2, dtype=torch.float64)
    inf = torch.stack([part.inf for part in found]).amax()
    return torch.stack([_weighted_l2(classes, [part.l2 for part in found]), inf])


def local_l2(classes: Sequence[LocalParts]) -> Tensor:
    """√Σ share·‖x‖₂² of the parts on this rank, fp64."""
    found = [l2_norm([tensor for tensor in part.tensors if tensor.numel()]) for part in classes]
    return _weighted_l2(classes, found) if found else torch.zeros((), dtype=torch.float64)


def norms_over_ranks(everyone: Tensor) -> tuple[Tensor, Tensor]:
    """(‖x‖₂, ‖x‖∞) of the whole, from `local_norms` of every rank: [ranks, 2]."""
    return whole_l2(everyone[:, 0]), everyone[:, 1].amax()


def whole_l2(everyone: Tensor) -> Tensor:
    """√Σ x² over ranks; x itself on one rank."""
    total: Tensor = everyone[0] if len(everyone) == 1 else torch.linalg.vector_norm(everyone)
    return total


def l2_over_ranks(classes: Sequence[LocalParts], group: ProcessGroup | None) -> Tensor:
    """‖x‖₂ of the whole, on every rank."""
    return whole_l2(gathered(local_l2(classes).reshape(1), group)[:, 0])


def _weighted_l2(classes: Sequence[LocalParts], l2: Sequence[Tensor]) -> Tensor:
    """√Σ share·‖x‖₂² over the classes."""
    if len(classes) == 1 and classes[0].share == 1:
        return l2[0]
    weighted = [value.to(l2[0].device) * part.share**0.5 for part, value in zip(classes, l2, strict=True)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(weighted))
    return total
