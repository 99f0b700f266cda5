"""Linear algebra on parameter gradients: which weighted sum of known gradients is a measured one?

A group is the counted or the masked decisions of one layer, z̄ its mean log Z. Three penalties are fitted, each with one weight a
for every group:

    squares         Σ a·mean(log Z − c)²
    constant        Σ a·mean(log Z)
    squared means   Σ a·(z̄ − c)², or with z̄ over all groups
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Gradient = list[Tensor]
"""One fp64 tensor per parameter."""


def gradient(value: Tensor, parameters: Sequence[Tensor], *, retain: bool = False) -> Gradient:
    """∇value, with zeros for parameters it does not reach."""
    found = torch.autograd.grad(value, list(parameters), retain_graph=retain, allow_unused=True)
    return [
        torch.zeros_like(p, dtype=torch.float64) if g is None else g.detach().double()
        for g, p in zip(found, parameters, strict=True)
    ]


def minus(a: Gradient, b: Gradient) -> Gradient:
    return [x - y for x, y in zip(a, b, strict=True)]


def dot(a: Gradient, b: Gradient) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))


def norm(a: Gradient) -> float:
    return float(dot(a, a) ** 0.5)


def least_squares(measured: Gradient, columns: Sequence[Gradient]) -> tuple[list[float], float]:
    """Weights that explain `measured` by the columns, and the unexplained share of its norm."""
    scale = [norm(column) or 1.0 for column in columns]
    unit = list(zip(columns, scale, strict=True))
    gram = torch.tensor([[dot(a, b) / (s * t) for b, t in unit] for a, s in unit], dtype=torch.float64)
    right = torch.tensor([[dot(a, measured) / s] for a, s in unit], dtype=torch.float64)
    # Columns of unit norm and the minimum-norm solution: a layer whose gradient is 0 gets weight 0.
    solved = torch.linalg.lstsq(gram, right, driver="gelsd").solution.squeeze(1)
    weights = [float(x) / s for x, s in zip(solved, scale, strict=True)]
    rest = measured
    for weight, column in zip(weights, columns, strict=True):
        rest = [x - weight * y for x, y in zip(rest, column, strict=True)]
    return weights, norm(rest) / norm(measured)


@dataclass(frozen=True)
class Draw:
    """What was measured at one setting of the router weights, and the gradients that may explain it."""

    measured: Gradient
    slopes: Sequence[Gradient]
    """∇mean(log Z) of every group."""
    bends: Sequence[Gradient]
    """∇mean(log Z − m)² of every group, m as in `centers`: nearly orthogonal to the slope where m is near z̄."""
    centers: Sequence[float]
    """m of every group, the same in all draws."""
    means: Sequence[float]
    """z̄ of every group."""
    sizes: Sequence[int]
    """Decisions of every group."""
    noise: float
    """Share of the norm of `measured` that rounding can make up."""

    def squares(self, c: float) -> list[Gradient]:
        """∇mean(log Z − c)² of every group."""
        parts = zip(self.bends, self.slopes, self.centers, strict=True)
        return [_plus(bend, 2 * (m - c), slope) for bend, slope, m in parts]

    def squared_means(self, c: float, *, over_all: bool) -> list[Gradient]:
        """∇(z̄ − c)² of every group."""
        means = self._means(over_all)
        return [[2 * (mean - c) * x for x in slope] for mean, slope in zip(means, self.slopes, strict=True)]

    def _means(self, over_all: bool) -> Sequence[float]:
        if not over_all:
            return self.means
        mean = sum(z * n for z, n in zip(self.means, self.sizes, strict=True)) / sum(self.sizes)
        return [mean] * len(self.means)


@dataclass(frozen=True)
class Fitted:
    """One penalty fitted to all draws."""

    c: float | None
    weights: Sequence[float]
    left: float
    """Unexplained share of the measured norm."""


def fit_constant(draws: Sequence[Draw]) -> Fitted:
    """Σ a·mean(log Z): the source is the same at every log Z."""
    return Fitted(None, *_explain(draws, [draw.slopes for draw in draws]))


def fit_squares(draws: Sequence[Draw], target: float | None) -> Fitted:
    """Σ a·mean(log Z − c)²; c is fitted where `target` is None."""
    c = target
    if c is None:
        weights, left = _explain(draws, [[*draw.bends, *draw.slopes] for draw in draws])
        groups = len(draws[0].slopes)
        # b = 2a(m − c), with one c for all groups, each counting by what it applies.
        c = _common_target(weights[:groups], weights[groups:], draws[0].centers)
        if c is None:
            return Fitted(None, weights[groups:], left)
    return Fitted(c, *_explain(draws, [draw.squares(c) for draw in draws]))


def fit_squared_means(draws: Sequence[Draw], target: float | None) -> Fitted:
    """Σ a·(z̄ − c)² with the mean of each group or of all of them, whichever explains more."""
    return min((_fit_squared_means(draws, target, over_all) for over_all in (False, True)), key=lambda fit: fit.left)


def _fit_squared_means(draws: Sequence[Draw], target: float | None, over_all: bool) -> Fitted:
    c = target
    if c is None:
        columns = [[*draw.squared_means(0.0, over_all=over_all), *draw.slopes] for draw in draws]
        weights, left = _explain(draws, columns)
        groups = len(draws[0].slopes)
        c = _common_target(weights[:groups], weights[groups:], [0.0] * groups)
        if c is None:
            return Fitted(None, weights[groups:], left)
    return Fitted(c, *_explain(draws, [draw.squared_means(c, over_all=over_all) for draw in draws]))


def _common_target(squares: Sequence[float], slopes: Sequence[float], centers: Sequence[float]) -> float | None:
    """c of a·(log Z − m)² + b·log Z in every group; None where there is no square."""
    total = sum(squares)
    if total == 0:
        return None
    return sum(a * m - b / 2 for a, b, m in zip(squares, slopes, centers, strict=True)) / total


def _explain(draws: Sequence[Draw], columns: Sequence[Sequence[Gradient]]) -> tuple[list[float], float]:
    """Least squares over all draws, each with the same influence; `columns` are those of every draw."""
    norms = [norm(draw.measured) for draw in draws]
    measured = [x / n for draw, n in zip(draws, norms, strict=True) for x in draw.measured]
    joined = [
        [x / n for column, n in zip(column_of_draws, norms, strict=True) for x in column]
        for column_of_draws in zip(*columns, strict=True)
    ]
    if not all(math.isfinite(norm(column)) for column in (measured, *joined)):
        return [math.nan] * len(joined), math.inf
    return least_squares(measured, joined)


def _plus(a: Gradient, factor: float, b: Gradient) -> Gradient:
    return [x + factor * y for x, y in zip(a, b, strict=True)]
