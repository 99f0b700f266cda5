"""Adam's state: its second moment, and the direction of its step before learning rate and weight decay.

    d_proxy = m / (√v + ε)                                    the paper's uncorrected proxy
    d_adam  = (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)        the bias-corrected direction

Scaling: norms are over all parameters as one vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zloss.errors import InputError
from zloss.optimizer.multi_tensor import Norms, buckets, inf_norm, l2_norm, norms, pieces


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
def read_adam(optimizer: StatefulOptimizer) -> AdamReading:
    """‖v‖∞ and the norms of both directions, by multi-tensor operations over groups of parameters of bounded size."""
    v_inf: list[Tensor] = []
    proxy: list[Norms] = []
    corrected: list[Norms] = []
    for group in optimizer.param_groups:
        states = [optimizer.state[p] for p in group["params"] if p in optimizer.state and len(optimizer.state[p])]
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
    if not v_inf:
        raise InputError("the optimizer has no state yet: read it after its first step.")
    return AdamReading(torch.stack(v_inf).amax(), _joined(proxy), _joined(corrected))


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
