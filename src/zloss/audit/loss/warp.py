"""What a loss may do to its logits before the softmax: a scale and a softcap, z' = cap · tanh(s z / cap).

Searched for only where no penalty on the logits as given explains the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.reference import Reference


@dataclass(frozen=True)
class Warp:
    """z' = cap · tanh(s z / cap); `cap` None is no softcap."""

    scale: float = 1.0
    cap: float | None = None

    @property
    def identity(self) -> bool:
        return self.scale == 1.0 and self.cap is None

    def reference(self, r: Reference) -> Reference:
        """The softmax of the warped logits."""
        if self.identity:
            return r
        z = self.scale * r.logits_TV
        return Reference(z if self.cap is None else self.cap * torch.tanh(z / self.cap), r.target_T, r.lanes)

    def transport(self, r: Reference, source_TV: Tensor) -> Tensor:
        """The source at the warped logits brought back to the given ones: times ∂z'/∂z."""
        if self.identity:
            return source_TV
        if self.cap is None:
            return self.scale * source_TV
        return self.scale * (1 - torch.tanh(self.scale * r.logits_TV / self.cap) ** 2) * source_TV

    def named(self) -> dict[str, float]:
        """What differs from leaving the logits alone."""
        scale = {} if self.scale == 1.0 else {"logit_scale": self.scale}
        return scale if self.cap is None else {**scale, "softcap": self.cap}


NO_WARP = Warp()


def find_warps(misfit: Callable[[Warp], float]) -> list[Warp]:
    """The best scale and the best softcap, each alone, the one with the smaller `misfit` first.

    A coarse grid in the logarithm, then refined.
    """
    families: tuple[Callable[[float], Warp], ...] = (
        lambda log: Warp(scale=math.exp(log)),
        lambda log: Warp(cap=math.exp(log)),
    )
    spans = ((math.log(1 / 64), math.log(64)), (math.log(2.0), math.log(512.0)))
    found = []
    for family, (low, high) in zip(families, spans, strict=True):
        steps = 41
        width = (high - low) / (steps - 1)
        grid = [low + i * width for i in range(steps)]
        best = min(grid, key=lambda log: misfit(family(log)))
        found.append(family(_golden(lambda log: misfit(family(log)), best - width, best + width)))  # noqa: B023
    return sorted(found, key=misfit)


def _golden(f: Callable[[float], float], low: float, high: float) -> float:
    """Minimum of a unimodal function to 1e-9 in its argument (golden section)."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = f(a), f(b)
    while high - low > 1e-9:
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = f(b)
    return (low + high) / 2
