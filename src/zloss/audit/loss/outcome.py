"""One call of an audited loss: its value, its gradient at the logits, what it returned beside itself, and its side effects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.output import Item


@dataclass(frozen=True)
class Reported:
    """A value a loss returned beside itself: its number (None if not a scalar), dtype, and whether it claims a gradient."""

    name: str
    value: float | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    requires_grad: bool


@dataclass(frozen=True)
class Outcome:
    """One call: everything in fp64 on the CPU, whatever the loss computed in."""

    value: float
    dtype: torch.dtype
    grad_TV: Tensor
    """∂(upstream · loss)/∂logits, before any conversion of ours to a mean."""
    grad_hidden_TD: Tensor | None
    """∂loss/∂hidden at the columns of the tokens, each times its s: δ · logitsᵀ, [T, T]; None of a loss of logits."""
    has_gradient: bool
    """False when the loss came without a graph."""
    reported: tuple[Reported, ...]
    overwritten: tuple[str, ...]
    """Names of the arguments whose contents had changed after backward."""
    beyond: float = 0.0
    """Norm of the gradient on the row that only a shifting loss is given, which has no target."""

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.grad_TV).all()) and abs(self.value) < float("inf")

    def item(self, name: str) -> Reported | None:
        return next((one for one in self.reported if one.name == name), None)


def read_item(item: Item) -> Reported:
    """A returned value as plain numbers."""
    value = item.value
    if not isinstance(value, Tensor):
        return Reported(item.name, value, (), None, False)
    number = float(value.detach().double().reshape(())) if value.numel() == 1 else None
    return Reported(item.name, number, tuple(value.shape), value.dtype, value.requires_grad)
