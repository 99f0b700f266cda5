"""Factorized Z-loss: shift and relative normalizer penalised apart (paper eq:factorized)."""

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
    require_centered_log_z,
    resolve_target,
)
from zloss.source.statistics import TokenStats


@dataclass(frozen=True)
class FactorizedZLoss(Objective):
    """λ_μ(μ − c_μ)² + λ_rel(log Z̃ − c_rel)²: the expansion of Z-loss without its cross term.

    Source: s·p − (s − 2λ_μ(μ − c_μ))/V with s = 2λ_rel(log Z̃ − c_rel). The paper uses λ_μ = λ_rel, c_μ = 0.

    >>> FactorizedZLoss(1e-4, 1e-4).active, FactorizedZLoss(None, 0.0).active
    (True, False)
    """

    shift_coef: float | None
    relative_coef: float | None
    shift_target: float = 0.0
    relative_target: float | None = None
    name: ClassVar[str] = "factorized"
    needs_mu: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_coefficient("shift_coef", self.shift_coef)
        check_coefficient("relative_coef", self.relative_coef)
        if not (is_number(self.shift_target) and math.isfinite(self.shift_target)):
            raise CoefficientError(
                f"`shift_target` is expected to be a finite number (0 in the paper), but got {self.shift_target!r}."
            )
        check_target("relative_target", self.relative_target)

    @property
    def active(self) -> bool:
        return is_on(self.shift_coef, self.relative_coef)

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        c_rel = resolve_target(self.relative_target, logits_TV.shape[-1])
        mu = logits_TV.mean(dim=-1)
        log_z_centered = torch.logsumexp(logits_TV - mu.unsqueeze(-1), dim=-1)
        shift = off_is_zero(self.shift_coef) * (mu - self.shift_target) ** 2
        return shift + off_is_zero(self.relative_coef) * (log_z_centered - c_rel) ** 2

    def source(self, stats: TokenStats) -> Source:
        relative = require_centered_log_z(stats, "Factorized Z-loss") - resolve_target(
            self.relative_target, stats.vocab
        )
        assert stats.mu is not None  # log Z̃ exists only with μ
        shift = stats.mu - self.shift_target
        shift_coef, relative_coef = off_is_zero(self.shift_coef), off_is_zero(self.relative_coef)
        s = 2 * relative_coef * relative
        return Source(
            value=shift_coef * shift**2 + relative_coef * relative**2,
            along_p=s,
            along_uniform=s - 2 * shift_coef * shift,
        )
