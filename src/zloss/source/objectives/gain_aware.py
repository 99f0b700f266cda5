"""Gain-aware Z-loss: the standard penalty, damped where the head amplifies (paper eq:gain_aware)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zloss.errors import CoefficientError
from zloss.source.objective import (
    Objective,
    Source,
    check_coefficient,
    check_target,
    is_number,
    is_on,
    off_is_zero,
    require_gain,
    resolve_target,
)
from zloss.source.statistics import TokenStats


@dataclass(frozen=True)
class GainAwareZLoss(Objective):
    """λ(log Z − c)² / (1 + β·sg(A_p²)); the stop-gradient is part of the objective.

    Source: 2λ(log Z − c)/(1 + βA_p²)·p. It attenuates the source where A_p is large; it does not lower A_p.

    >>> logits, gain = torch.zeros(1, 4), torch.tensor([10.0])
    >>> float(GainAwareZLoss(1.0, beta=0.01, target=0.0).penalty(logits, gain))  # (log 4)² / 2
    0.960906...
    """

    coef: float | None
    beta: float = 1e-2
    target: float | None = None
    name: ClassVar[str] = "gain-aware"
    needs_gain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_coefficient("coef", self.coef)
        check_target("target", self.target)
        if not (is_number(self.beta) and math.isfinite(self.beta) and self.beta >= 0):
            raise CoefficientError(f"`beta` is expected to be a finite number ≥ 0, but got {self.beta!r}.")

    @property
    def active(self) -> bool:
        return is_on(self.coef)

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c = resolve_target(self.target, logits_TV.shape[-1])
        damping = 1 + self.beta * require_gain(gain_T, "Gain-aware Z-loss").detach() ** 2
        return off_is_zero(self.coef) * (torch.logsumexp(logits_TV, dim=-1) - c) ** 2 / damping

    def source(self, stats: TokenStats) -> Source:
        violation = stats.log_z - resolve_target(self.target, stats.vocab)
        weight = off_is_zero(self.coef) / (1 + self.beta * require_gain(stats.gain, "Gain-aware Z-loss") ** 2)
        return Source(value=weight * violation**2, along_p=2 * weight * violation)
