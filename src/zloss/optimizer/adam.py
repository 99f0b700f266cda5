"""Adam's state: its second moment, and the direction of its step before learning rate and weight decay.

    d_proxy = m / (√v + ε)                                    the paper's uncorrected proxy
    d_adam  = (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)        the bias-corrected direction

Scaling: norms are over all parameters as one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import gathered, local_part, share_of
from zloss.errors import InputError
from zloss.optimizer.norms import buckets, inf_norm, norms, pieces


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

    Multi-tensor operations over groups of parameters bound the size of temporaries. `group`: the ranks that hold
    distributed state; each reads its local part, and one all-gather joins them. `share(p)`: the weight of an entry of p
    on this rank; by default 1/k if k ranks of the group hold it.
    """
    ranks = 1 if group is None else group.size()
    parameters = [p for g in optimizer.param_groups for p in g["params"] if len(optimizer.state.get(p, ()))]
    if not parameters:
        raise InputError("the optimizer has no state yet: read it after its first step.")
    shares_by_id = {id(p): share_of(p, ranks) if share is None else share(p) for p in parameters}
    shares = sorted(set(shares_by_id.values()))
    local_5S = torch.stack([_local_reading(optimizer, each, shares_by_id) for each in shares], dim=1)
    if group is None:
        return local_5S[:, 0]
    # Squares are weighted by the share, so ℓ₂ norms (entries 1 and 3) by its root.
    local_5S[1::2] *= local_5S.new_tensor([each**0.5 for each in shares])
    return _joined(gathered(_joined(local_5S), group).T)


def _joined(reading_5N: Tensor) -> Tensor:
    """The reading of N disjoint parts as one."""
    v_inf, proxy_l2, proxy_inf, adam_l2, adam_inf = reading_5N
    norm = torch.linalg.vector_norm
    return torch.stack([v_inf.amax(), norm(proxy_l2), proxy_inf.amax(), norm(adam_l2), adam_inf.amax()])


def _local_reading(optimizer: StatefulOptimizer, share: float, shares: dict[int, float]) -> Tensor:
    """The reading of the local parts of all parameters with one share; zeros if this rank has none of their entries."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        states = [
            {
                key: local_part(value) if isinstance(value, Tensor) else value
                for key, value in optimizer.state[p].items()
            }
            for p in group["params"]
            if len(optimizer.state.get(p, ())) and shares[id(p)] == share
        ]
        if not states:
            continue
        if "exp_avg_sq" not in states[0] or "exp_avg" not in states[0]:
            raise InputError(f"{type(optimizer).__name__} keeps no first and second moments: Adam or AdamW is needed.")
        m_parts, v_parts = (pieces([state[key] for state in states]) for key in ("exp_avg", "exp_avg_sq"))
        steps = _steps_of_pieces(states)
        for run in buckets(m_parts):
            m, v, t = m_parts[run], v_parts[run], steps[run]
            proxy = norms(_direction(m, v, group["eps"]))
            first = [1 - group["betas"][0] ** step for step in t]
            second = [1 - group["betas"][1] ** step for step in t]
            corrected = norms(_direction(m, v, group["eps"], first, second))
            found.append(torch.stack([inf_norm(v), proxy.l2, proxy.inf, corrected.l2, corrected.inf]))
    return _joined(torch.stack(found, dim=1)) if found else torch.zeros(5, dtype=torch.float64)


def _direction(
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    eps: float,
    first: list[float] | None = None,
    second: list[float] | None = None,
) -> list[Tensor]:
    """m/c₁ / (√(v/c₂) + ε); `first` and `second` are the corrections c₁ and c₂ of each piece, by default 1."""
    root = torch._foreach_sqrt(list(v) if second is None else torch._foreach_div(list(v), second))
    torch._foreach_add_(root, eps)
    direction = torch._foreach_div(list(m), root)
    if first is not None:
        torch._foreach_div_(direction, first)
    return list(direction)


def _steps_of_pieces(states: Sequence[dict[str, Any]]) -> list[float]:
    """Adam's step count for each piece. A fused optimizer keeps the counts on the device, so one transfer reads them all."""
    counts = torch.stack([torch.as_tensor(state["step"], dtype=torch.float32).reshape(()) for state in states]).tolist()
    return [
        count
        for count, state in zip(counts, states, strict=True)
        for _ in range(len(pieces([state["exp_avg"]])))
    ]  # fmt: skip


EPSILON = 1e-8
"""ε_Adam, the default of every Adam; it is added to |g|, so the scale of the gradient matters."""


def first_direction(grad: Tensor, *, epsilon: float = EPSILON) -> Tensor:
    """g / (|g| + ε): Adam's bias-corrected direction m̂/(√v̂ + ε) after one step from zero state, for any β₁, β₂.

    m₁ = (1 − β₁)g and v₁ = (1 − β₂)g², and the corrections divide by exactly these factors. Scaling: before learning
    rate and weight decay; not invariant to the scale of g, because of ε.

    >>> import torch
    >>> first_direction(torch.tensor([2.0, -1e-8, 0.0]))
    tensor([ 1.0000, -0.5000,  0.0000])
    """
    return grad / (grad.abs() + epsilon)
