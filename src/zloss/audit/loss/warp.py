"""What a loss may do to its logits before the softmax: clamp, scale and softcap, z' = cap · tanh(s clamp(z) / cap).

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
    """z' = cap · tanh(s z / cap) of z clamped to [low, high]; `cap` None is no softcap."""

    scale: float = 1.0
    cap: float | None = None
    low: float = -math.inf
    high: float = math.inf

    @property
    def identity(self) -> bool:
        return self.scale == 1.0 and self.cap is None and not self.clamps

    @property
    def clamps(self) -> bool:
        return math.isfinite(self.low) or math.isfinite(self.high)

    def reference(self, r: Reference) -> Reference:
        """The softmax of the warped logits."""
        if self.identity:
            return r
        z = self.scale * r.logits_TV.clamp(self.low, self.high)
        return Reference(z if self.cap is None else self.cap * torch.tanh(z / self.cap), r.target_T, r.lanes)

    def transport(self, r: Reference, source_TV: Tensor) -> Tensor:
        """The source at the warped logits brought back to the given ones: times ∂z'/∂z."""
        if self.identity:
            return source_TV
        if self.clamps:
            source_TV = source_TV * ((r.logits_TV >= self.low) & (r.logits_TV <= self.high))
        if self.cap is None:
            return self.scale * source_TV
        z = r.logits_TV.clamp(self.low, self.high)
        return self.scale * (1 - torch.tanh(self.scale * z / self.cap) ** 2) * source_TV

    def named(self) -> dict[str, float]:
        """What differs from leaving the logits alone."""
        named = {
            "logit_scale": None if self.scale == 1.0 else self.scale,
            "softcap": self.cap,
            "clamp_low": self.low if math.isfinite(self.low) else None,
            "clamp_high": self.high if math.isfinite(self.high) else None,
        }
        return {key: value for key, value in named.items() if value is not None}


NO_WARP = Warp()
GOOD = 1e-5
"""A misfit below this needs no further parameter."""


def find_warps(misfit: Callable[[Warp], float]) -> list[Warp]:
    """The best scale, the best softcap, and the best of both together, the one with the smallest `misfit` first.

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
    if misfit(min(found, key=misfit)) > GOOD:
        found.append(_both(misfit, spans))
    return sorted(found, key=misfit)


def _both(misfit: Callable[[Warp], float], spans: tuple[tuple[float, float], ...]) -> Warp:
    """Scale and softcap together: a grid, then ever smaller steps of a pattern search in both logarithms."""

    def f(at: tuple[float, float]) -> float:
        return misfit(Warp(scale=math.exp(at[0]), cap=math.exp(at[1])))

    (low_s, high_s), (low_c, high_c) = spans
    steps = 13
    grid = [
        (low_s + (high_s - low_s) * i / (steps - 1), low_c + (high_c - low_c) * j / (steps - 1))
        for i in range(steps)
        for j in range(steps)
    ]
    starts = sorted(grid, key=f)[:2]
    best = min((_simplex(f, start) for start in starts), key=f)
    return Warp(scale=math.exp(best[0]), cap=math.exp(best[1]))


def _simplex(f: Callable[[tuple[float, float]], float], start: tuple[float, float]) -> tuple[float, float]:
    """Nelder and Mead's minimum in two dimensions, to 1e-10 in the arguments."""
    corners = [(f(at), at) for at in (start, (start[0] + 0.2, start[1]), (start[0], start[1] + 0.2))]
    for _ in range(400):
        corners.sort()
        (fa, a), (fb, b), (fc, c) = corners
        if max(abs(a[0] - c[0]), abs(a[1] - c[1]), abs(a[0] - b[0]), abs(a[1] - b[1])) < 1e-10:
            break
        middle = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)

        def at(k: float, middle: tuple[float, float] = middle, c: tuple[float, float] = c) -> tuple[float, float]:
            return (middle[0] + k * (middle[0] - c[0]), middle[1] + k * (middle[1] - c[1]))

        reflected = f(at(1.0))
        if reflected < fa:
            expanded = f(at(2.0))
            corners[2] = (expanded, at(2.0)) if expanded < reflected else (reflected, at(1.0))
        elif reflected < fb:
            corners[2] = (reflected, at(1.0))
        else:
            inner = f(at(-0.5))
            if inner < fc:
                corners[2] = (inner, at(-0.5))
            else:
                closer = [((x[0] + a[0]) / 2, (x[1] + a[1]) / 2) for x in (b, c)]
                corners = [(fa, a), *((f(x), x) for x in closer)]
    return min(corners)[1]


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
