"""Adam's state: its second moment, and the direction of its step before learning rate and weight decay.

    d_proxy = m / (√v + ε)                                    the paper's uncorrected proxy
    d_adam  = (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)        the bias-corrected direction

Scaling: norms are over all parameters as one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.errors import InputError
from zloss.optimizer.norms import Norms, buckets, inf_norm, l2_norm, norms, pieces
from zloss.ranks.own_parts import own_part, share_of
from zloss.ranks.process_group import gathered


class StatefulOptimizer(Protocol):
    """The part of an optimizer that is read: `torch.optim.AdamW` has it, and accelerate's wrapper around one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Any: ...


@dataclass(frozen=True)
class AdamReading:
    """One sample of the state, as 0-d fp64 tensors."""

    v_inf: Tensor
    """‖v‖∞ of the second moment."""
    proxy: Norms
    """Norms of d_proxy."""
    corrected: Norms
    """Norms of d_adam."""

    def stacked(self) -> Tensor:
        """[v_inf, proxy l2, proxy inf, corrected l2, corrected inf]: one tensor, so one transfer."""
        parts = (self.v_inf, self.proxy.l2, self.proxy.inf, self.corrected.l2, self.corrected.inf)
        return torch.stack([part.double() for part in parts])


@torch.no_grad()
def read_adam(
    optimizer: StatefulOptimizer, group: ProcessGroup | None = None, share: Callable[[Tensor], float] | None = None
) -> AdamReading:
    """‖v‖∞ and the norms of both directions, by multi-tensor operations over groups of parameters of bounded size.

    `group`: the ranks over which distributed state is spread; each reads its own part, and one all-gather joins them.
    `share(p)`: by how much an entry of p counts on this rank; by default 1/k where k ranks of the group hold it.
    """
    ranks = 1 if group is None else group.size()
    parameters = [p for g in optimizer.param_groups for p in g["params"] if len(optimizer.state.get(p, ()))]
    if not parameters:
        raise InputError("the optimizer has no state yet: read it after its first step.")
    shares_by_id = {id(p): share_of(p, ranks) if share is None else share(p) for p in parameters}
    shares = sorted(set(shares_by_id.values()))
    own = [_own_reading(optimizer, each, shares_by_id) for each in shares]
    if group is None:
        return own[0]
    weights = [each**0.5 for each in shares]
    everyone = gathered(_joined_shares(own, weights).stacked(), group)
    return AdamReading(
        everyone[:, 0].amax(),
        Norms(torch.linalg.vector_norm(everyone[:, 1]), everyone[:, 2].amax()),
        Norms(torch.linalg.vector_norm(everyone[:, 3]), everyone[:, 4].amax()),
    )


def _joined_shares(parts: Sequence[AdamReading], weights: Sequence[float]) -> AdamReading:
    """Readings of classes of parameters, the squares of each class counted by its share."""

    def norms_of(found: Sequence[Norms]) -> Norms:
        l2 = torch.stack([weight * part.l2 for part, weight in zip(found, weights, strict=True)])
        return Norms(torch.linalg.vector_norm(l2), torch.stack([part.inf for part in found]).amax())

    v_inf = torch.stack([part.v_inf for part in parts]).amax()
    return AdamReading(v_inf, norms_of([part.proxy for part in parts]), norms_of([part.corrected for part in parts]))


def _own_reading(optimizer: StatefulOptimizer, share: float, shares: dict[int, float]) -> AdamReading:
    """The reading of own parts of the parameters with one share."""
    v_inf: list[Tensor] = []
    proxy: list[Norms] = []
    corrected: list[Norms] = []
    for group in optimizer.param_groups:
        states = [
            _own_state(optimizer.state[p])
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
            v_inf.append(inf_norm(v))
            proxy.append(norms(_direction(m, v, group["eps"])))
            first = [1 - group["betas"][0] ** step for step in t]
            second = [1 - group["betas"][1] ** step for step in t]
            corrected.append(norms(_direction(m, v, group["eps"], first, second)))
    if not v_inf:  # this rank holds no entry of these parameters
        zero = torch.zeros((), dtype=torch.float64)
        return AdamReading(zero, Norms(zero, zero), Norms(zero, zero))
    return AdamReading(torch.stack(v_inf).amax(), _joined(proxy), _joined(corrected))


def _own_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: own_part(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def _direction(
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    eps: float,
    first: list[float] | None = None,
    second: list[float] | None = None,
) -> list[Tensor]:
    """m/c₁ / (√(v/c₂) + ε), with both corrections 1 where they are not given."""
    root = torch._foreach_sqrt(list(v) if second is None else torch._foreach_div(list(v), second))
    torch._foreach_add_(root, eps)
    direction = torch._foreach_div(list(m), root)
    if first is not None:
        torch._foreach_div_(direction, first)
    return list(direction)


def _steps_of_pieces(states: Sequence[dict[str, Any]]) -> list[float]:
    """Adam's own step count for each piece. A fused optimizer keeps the counts on the device: one transfer reads them all."""
    counts = torch.stack([torch.as_tensor(state["step"], dtype=torch.float32).reshape(()) for state in states]).tolist()
    return [
        count
        for count, state in zip(counts, states, strict=True)
        for _ in range(len(pieces([state["exp_avg"]])))
    ]  # fmt: skip


def _joined(parts: Sequence[Norms]) -> Norms:
    return Norms(l2_norm([torch.stack([part.l2 for part in parts])]), torch.stack([p.inf for p in parts]).amax())


EPSILON = 1e-8
"""ε_Adam, the default of every Adam; it enters beside |g|, so the scale of the gradient matters."""


def first_direction(grad: Tensor, *, epsilon: float = EPSILON) -> Tensor:
    """g / (|g| + ε): Adam's bias-corrected direction m̂/(√v̂ + ε) after one step from zero state, for any β₁, β₂.

    m₁ = (1 − β₁)g and v₁ = (1 − β₂)g², and the corrections divide by exactly these factors. Scaling: before learning
    rate and weight decay; not invariant to the scale of g, because of ε.

    >>> import torch
    >>> first_direction(torch.tensor([2.0, -1e-8, 0.0]))
    tensor([ 1.0000, -0.5000,  0.0000])
    """
    return grad / (grad.abs() + epsilon)
