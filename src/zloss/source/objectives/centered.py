"""Centered Z-loss: λ(log Z̃ − c)² on row-centered logits (paper eq:centered_head, eq:centered_raw_adjoint)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zloss.source.objective import (
    Coordinate,
    Objective,
    Source,
    check_coefficient,
    check_target,
    is_on,
    off_is_zero,
    require_centered_log_z,
    resolve_target,
)
from zloss.source.statistics import TokenStats


@dataclass(frozen=True)
class CenteredZLoss(Objective):
    """λ(log Z̃ − c)² with log Z̃ = log Z − μ; source s·(p − 1/V) with s = 2λ(log Z̃ − c).

    The source sums to zero over the vocabulary, and a common shift of the logits does not change it.

    >>> logits = torch.tensor([[1.0, 2.0, 4.0]])
    >>> bool(torch.allclose(CenteredZLoss(0.1).penalty(logits + 50, None), CenteredZLoss(0.1).penalty(logits, None)))
    True
    """

    coef: float | None
    target: float | None = None
    name: ClassVar[str] = "centered"
    coordinate: ClassVar[Coordinate] = "centered"
    needs_mu: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_coefficient("coef", self.coef)
        check_target("target", self.target)

    @property
    def active(self) -> bool:
        return is_on(self.coef)

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c = resolve_target(self.target, logits_TV.shape[-1])
        centered_TV = logits_TV - logits_TV.mean(dim=-1, keepdim=True)
        return off_is_zero(self.coef) * (torch.logsumexp(centered_TV, dim=-1) - c) ** 2

    def source(self, stats: TokenStats) -> Source:
        violation = require_centered_log_z(stats, "Centered Z-loss") - resolve_target(self.target, stats.vocab)
        coef = off_is_zero(self.coef)
        s = 2 * coef * violation
        return Source(value=coef * violation**2, along_p=s, along_uniform=s)
