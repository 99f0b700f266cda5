"""Plain cross-entropy: no auxiliary source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zloss.source.objective import Objective, Source
from zloss.source.statistics import TokenStats


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """The CE baseline, deployed with raw logits.

    >>> CrossEntropy().active
    False
    """

    name: ClassVar[str] = "ce"

    @property
    def active(self) -> bool:
        return False

    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        return logits_TV.new_zeros(logits_TV.shape[:-1])

    def source(self, stats: TokenStats) -> Source:
        zero = torch.zeros_like(stats.log_s)
        return Source(value=zero, along_p=zero)
