"""Norms of gradients, parameters and Adam's state: multi-tensor operations, fp64 sums, no transfer to the host.

A plain fp32 norm of a large CPU tensor sums its squares sequentially, and its relative error grows with the length (1e-2
at 10⁸ entries). Here a large CPU tensor is read as pieces of 2¹⁵ entries, on all threads. Their fp32 norms are accurate to
1e-7 and are combined in fp64. An accelerator reduces in a tree, so its tensors are read whole.

Adam's direction is that of its step before learning rate and weight decay:

    d_proxy = m / (√v + ε)                                    the paper's uncorrected proxy
    d_adam  = (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)        the bias-corrected direction

Scaling: norms are over all tensors as one vector. A tensor has a share where several ranks hold the same entries, see
`zloss.distributed.share_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import gathered, local_part, share_of
from zloss.errors import InputError

PIECE = 2**15
"""Entries of a piece of a CPU tensor."""
AT_ONCE = 2**24
"""Entries of Adam's state that are read at a time, which bounds the size of temporaries."""
EPSILON = 1e-8
"""ε_Adam, the default of every Adam; it is added to |g|, so the scale of the gradient matters."""


def l2_norm(tensors: Sequence[Tensor], shares: Sequence[float] | None = None) -> Tensor:
    """√Σ share·‖x‖₂² in fp64, with shares of 1 by default; a NaN anywhere makes it NaN."""
    # 16-bit gradients are summed in fp32 at least.
    narrow = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
    dtype = torch.float32 if narrow else None
    found: list[Tensor] = []
    rest: list[Tensor] = []
    weights: list[float] = []
    for tensor, share in zip(tensors, shares or [1.0] * len(tensors), strict=True):
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // PIECE * PIECE if flat.device.type == "cpu" and flat.numel() > PIECE else 0
        if whole:
            pieces = torch.linalg.vector_norm(flat[:whole].view(-1, PIECE), dim=1, dtype=dtype)
            found.append(pieces.double() * share**0.5)
        if whole < flat.numel():
            rest.append(flat[whole:])
            weights.append(share**0.5)
    if rest:
        each = torch.stack([value.double() for value in torch._foreach_norm(rest, 2.0, dtype=dtype)])
        found.append(each * each.new_tensor(weights))
    total: Tensor = torch.linalg.vector_norm(torch.cat(found)) if found else torch.zeros((), dtype=torch.float64)
    return total


def inf_norm(tensors: Sequence[Tensor]) -> Tensor:
    """max_i |x_i| in fp64; a NaN anywhere makes it NaN."""
    tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    if tensors[0].device.type == "cpu":
        # On the CPU, aminmax is vectorized and torch's ∞-norm is not.
        ends = [end for tensor in tensors for end in torch.aminmax(tensor)]
        return torch.stack(ends).double().abs().amax()
    return torch.stack([value.double() for value in torch._foreach_norm(tensors, float("inf"))]).amax()


def l2_over_ranks(everyone: Tensor) -> Tensor:
    """√Σ x² over ranks; x itself on one rank."""
    total: Tensor = everyone[0] if len(everyone) == 1 else torch.linalg.vector_norm(everyone)
    return total


class StatefulOptimizer(Protocol):
    """The attributes that are read: those of `torch.optim.AdamW` and of accelerate's wrapper around it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Any: ...


@torch.no_grad()
def read_adam(
    optimizer: StatefulOptimizer, group: ProcessGroup | None = None, share: Callable[[Tensor], float] | None = None
) -> Tensor:
    """[‖v‖∞, ‖d_proxy‖₂, ‖d_proxy‖∞, ‖d_adam‖₂, ‖d_adam‖∞] in fp64: one tensor, so one transfer to the host.

    `group`: the ranks that hold distributed state; each reads its local part, and one all-gather joins them. `share(p)`: the
    weight of an entry of p on this rank; by default 1/k if k ranks of the group hold it.
    """
    found = [
        (settings, optimizer.state[p], share_of(p, 1 if group is None else group.size()) if share is None else share(p))
        for settings in optimizer.param_groups
        for p in settings["params"]
        if len(optimizer.state.get(p, ()))
    ]
    if not found:
        raise InputError("the optimizer has no state yet: read it after its first step.")
    if any(not {"exp_avg", "exp_avg_sq"} <= state.keys() for _, state, _ in found):
        raise InputError(f"{type(optimizer).__name__} keeps no first and second moments: Adam or AdamW is needed.")
    # A fused optimizer keeps the step counts on the device, so one transfer reads them all.
    counts = torch.stack([torch.as_tensor(state["step"], dtype=torch.float32).reshape(()) for _, state, _ in found])
    readings: list[Tensor] = []
    for (settings, state, weight), count in zip(found, counts.tolist(), strict=True):
        first, second = (1 - beta**count for beta in settings["betas"])
        moments = (torch.split(local_part(state[key]).reshape(-1), AT_ONCE) for key in ("exp_avg", "exp_avg_sq"))
        for m, v in zip(*moments, strict=True):
            proxy = m / (v.sqrt() + settings["eps"])
            adam = m / ((v / second).sqrt() + settings["eps"]) / first
            norms = [inf_norm([v]), *(norm for d in (proxy, adam) for norm in (l2_norm([d], [weight]), inf_norm([d])))]
            readings.append(torch.stack(norms))
    local = _joined(torch.stack(readings)) if readings else torch.zeros(5, dtype=torch.float64)
    return local if group is None else _joined(gathered(local, group))


def _joined(readings_N5: Tensor) -> Tensor:
    """The reading of N disjoint parts as one."""
    l2, largest = torch.linalg.vector_norm(readings_N5, dim=0), readings_N5.amax(dim=0)
    return torch.stack([largest[0], l2[1], largest[2], l2[3], largest[4]])


def first_direction(grad: Tensor, *, epsilon: float = EPSILON) -> Tensor:
    """g / (|g| + ε): Adam's bias-corrected direction m̂/(√v̂ + ε) after one step from zero state, for any β₁, β₂.

    m₁ = (1 − β₁)g and v₁ = (1 − β₂)g², and the corrections divide by exactly these factors. Scaling: before learning
    rate and weight decay; not invariant to the scale of g, because of ε.

    >>> import torch
    >>> first_direction(torch.tensor([2.0, -1e-8, 0.0]))
    tensor([ 1.0000, -0.5000,  0.0000])
    """
    return grad / (grad.abs() + epsilon)
