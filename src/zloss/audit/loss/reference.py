"""The fp64 softmax of probe logits: what every prediction is made of. Axes: T tokens, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zloss.audit.loss.callable import hidden_scales


@dataclass(frozen=True)
class Reference:
    """Statistics of fp64 logits over the first `lanes` columns; the columns beyond are padding, with p = 0."""

    logits_TV: Tensor
    target_T: Tensor
    """Class indices; a negative entry is an ignored token."""
    lanes: int

    @cached_property
    def valid_T(self) -> Tensor:
        return self.target_T >= 0

    @cached_property
    def inside_TV(self) -> Tensor:
        return self.logits_TV[:, : self.lanes]

    @cached_property
    def log_z_T(self) -> Tensor:
        return torch.logsumexp(self.inside_TV, dim=-1)

    @cached_property
    def mu_T(self) -> Tensor:
        return self.inside_TV.mean(dim=-1)

    @cached_property
    def max_T(self) -> Tensor:
        return self.inside_TV.amax(dim=-1)

    @cached_property
    def p_TV(self) -> Tensor:
        return self.widen(torch.softmax(self.inside_TV, dim=-1))

    @cached_property
    def uniform_TV(self) -> Tensor:
        """1/V on the lanes inside log Z."""
        return self.widen(torch.full_like(self.inside_TV, 1.0 / self.lanes))

    @cached_property
    def onehot_TV(self) -> Tensor:
        """onehot(y); a zero row at ignored tokens."""
        onehot = torch.zeros_like(self.logits_TV)
        rows = self.valid_T.nonzero().squeeze(-1)
        onehot[rows, self.target_T[rows]] = 1.0
        return onehot

    @cached_property
    def cross_entropy_T(self) -> Tensor:
        """log Z − z_y; 0 at ignored tokens."""
        picked = (self.logits_TV * self.onehot_TV).sum(-1)
        return torch.where(self.valid_T, self.log_z_T - picked, torch.zeros_like(picked))

    @cached_property
    def gain_squared_T(self) -> Tensor:
        """A_p² = ‖Wᵀp‖²/‖p‖² of the head a linear probe passes: W = (logits/s)ᵀ of the whole batch."""
        p, scale_T = self.p_TV[:, : self.lanes], hidden_scales(len(self.target_T))
        return (p @ (self.inside_TV.T / scale_T)).square().sum(-1) / p.square().sum(-1)

    def widen(self, inside: Tensor) -> Tensor:
        """Append zero columns for the padding lanes."""
        missing = self.logits_TV.shape[-1] - self.lanes
        return torch.nn.functional.pad(inside, (0, missing)) if missing else inside

    def argmax_TV(self, *, split: bool) -> Tensor:
        """onehot(argmax z): the first maximum, or shared evenly between tied maxima (`amax` against `max`)."""
        top = (self.inside_TV == self.max_T.unsqueeze(-1)).to(self.logits_TV.dtype)
        if not split:
            top = top * (top.cumsum(-1) == 1)
        return self.widen(top / top.sum(-1, keepdim=True))


def concatenate(parts: list[Reference]) -> Reference:
    """The tokens of several references as one."""
    lanes = parts[0].lanes
    return Reference(torch.cat([r.logits_TV for r in parts]), torch.cat([r.target_T for r in parts]), lanes)
