"""Standard Z-loss: λ(log Z − c)² on raw logits (paper eq:zloss, eq:source)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zloss.source.objective import (
    Objective,
    Source,
    check_coefficient,
    check_target,
    is_on,
    off_is_zero,
    resolve_target,
)
from zloss.source.statistics import TokenStats


@dataclass(frozen=True)
class StandardZLoss(Objective):
    """λ(log Z − c)²; source 2λ(log Z − c)·p.

    `target=None` is c = log V, as in the paper; most codebases use 0.

    >>> StandardZLoss(1e-4).active, StandardZLoss(0.0).active, StandardZLoss(None).active
    (True, False, False)
    """

    coef: float | None
    target: float | None = None
    name: ClassVar[str] = "standard"

    def __post_init__(self) -> None:
        check_coefficient("coef", self.coef)
        check_target("target", self.target)

    @property
    def active(self) -> bool:
        return is_on(self.coef)

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c = resolve_target(self.target, logits_TV.shape[-1])
        return off_is_zero(self.coef) * (torch.logsumexp(logits_TV, dim=-1) - c) ** 2

    def source(self, stats: TokenStats) -> Source:
        violation = stats.log_z - resolve_target(self.target, stats.vocab)
        coef = off_is_zero(self.coef)
        return Source(value=coef * violation**2, along_p=2 * coef * violation)
