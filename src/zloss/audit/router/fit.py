"""Linear algebra on parameter gradients: which weighted sum of known gradients is a measured one?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zloss.errors import InputError

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


def fit_target(measured: Gradient, parts: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[float, float]:
    """c of Σ_g a_g·mean_g(log Z − c)², from the log Z of every group of decisions, and the unexplained share.

    The columns are ∇mean(log Z − z̄)² and ∇mean(log Z): around the mean z̄ they are nearly orthogonal, and
    b = 2a(z̄ − c).
    """
    columns: list[Gradient] = []
    means = [float(part.detach().double().mean()) for part in parts]
    for part, mean in zip(parts, means, strict=True):
        columns.append(gradient(((part - mean) ** 2).mean(), parameters, retain=True))
        columns.append(gradient(part.mean(), parameters, retain=True))
    weights, left = least_squares(measured, columns)
    squares, slopes = weights[0::2], weights[1::2]
    if sum(squares) == 0:
        raise InputError("log Z does not vary over these decisions, so c cannot be fitted: pass `target`.")
    # One c for all groups, weighed by what each applies.
    c = sum(a * mean - b / 2 for a, b, mean in zip(squares, slopes, means, strict=True)) / sum(squares)
    return c, left
