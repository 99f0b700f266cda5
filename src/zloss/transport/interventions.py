"""Interventions on an output head: centering it, deploying it centered, and shifting it on purpose."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from zloss.errors import InputError, ShapeError, TiedHeadError
from zloss.source.listing import centered_logits_from_raw

_TIED = (
    "{what} would also change the input embedding, because the head is tied to it. "
    "Deploy with CenteredHeadWrapper(linear) instead, or untie first: "
    "linear.weight = nn.Parameter(linear.weight.detach().clone())."
)


def _refuse_tied(linear: nn.Linear, tied_to: nn.Module | Tensor | None, what: str) -> None:
    """Writing into a tied table would also move every input embedding."""
    if not isinstance(linear, nn.Linear):
        raise InputError(f"{what} works on an nn.Linear output head, but got {type(linear).__name__}.")
    if tied_to is None:
        if _held_elsewhere(linear):
            raise TiedHeadError(_TIED.format(what=what))
        return
    tables = [tied_to] if isinstance(tied_to, Tensor) else list(tied_to.parameters())
    owners = [p for p in tables if p is linear.weight or p.data_ptr() == linear.weight.data_ptr()]
    # A model that contains the head lists its weight once if untied; a tied one is also an embedding's weight.
    if isinstance(tied_to, nn.Module) and owners:
        embeddings = [m for m in tied_to.modules() if isinstance(m, nn.Embedding)]
        owners = [m.weight for m in embeddings if m.weight.data_ptr() == linear.weight.data_ptr()]
    if owners:
        raise TiedHeadError(_TIED.format(what=what))


def _held_elsewhere(linear: nn.Linear) -> bool:
    """Whether another module that is alive holds the same weight: what tying means, seen without knowing the model."""
    for holder in gc.get_referrers(linear.weight):
        if isinstance(holder, dict) and holder is not linear._parameters and linear.weight is holder.get("weight"):
            owners = (owner for owner in gc.get_referrers(holder) if owner is not linear)
            if any(isinstance(owner, nn.Module) or "_parameters" in getattr(owner, "keys", dict)() for owner in owners):
                return True
    return False


@torch.no_grad()
def center_head_(linear: nn.Linear, *, model: nn.Module | Tensor | None = None) -> nn.Linear:
    """Write W − 1w̄ (and b − b̄) into an untied head: softmax and cross-entropy stay, μ becomes 0 (paper eq:centered_head).

    A tied head is refused: it is recognised by the other module that holds its weight, or through `model` (or the
    embedding table) where two parameters share one storage.
    """
    _refuse_tied(linear, model, "center_head_")
    weight = linear.weight.double()
    linear.weight.copy_(weight - weight.mean(dim=0))
    if linear.bias is not None:
        bias = linear.bias.double()
        linear.bias.copy_(bias - bias.mean())
    return linear


@torch.no_grad()
def shift_head_(linear: nn.Linear, shift: Tensor, *, model: nn.Module | Tensor | None = None) -> nn.Linear:
    """Add one vector [D] to every row of an untied head: cross-entropy stays, μ moves by shift·u. A controlled probe."""
    _refuse_tied(linear, model, "shift_head_")
    if not isinstance(shift, Tensor):
        raise InputError(f"`shift` is expected to be a tensor [D], but got {type(shift).__name__}.")
    if shift.shape != (linear.in_features,):
        raise ShapeError(f"`shift` is expected to be [D] = [{linear.in_features}], but got {list(shift.shape)}.")
    linear.weight.copy_(linear.weight.double() + shift.to(linear.weight.device).double())
    return linear


class CenteredHeadWrapper(nn.Module):
    """Deploy a head, tied or not, with centered logits: the raw projection minus its fp32 common shift.

    z̃ = z_raw − μ_head·1 (paper eq:centered_raw). The raw projection runs as the wrapped head does (16 bits included), so
    the realized softmax is unchanged; the weights are not touched. The output is fp32.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return centered_logits_from_raw(self.linear(hidden), hidden, self.linear.weight, self.linear.bias)
