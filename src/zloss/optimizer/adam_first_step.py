"""The direction of Adam's first step: what coordinate-wise normalization makes of one gradient."""

from __future__ import annotations

from torch import Tensor

EPSILON = 1e-8
"""ε_Adam, the default of every Adam; it enters beside |g|, so the scale of the gradient matters."""


def first_direction(grad: Tensor, *, epsilon: float = EPSILON) -> Tensor:
    """g / (|g| + ε): Adam's bias-corrected direction m̂/(√v̂ + ε) after one step from zero state, for any β₁, β₂.

    m₁ = (1 − β₁)g and v₁ = (1 − β₂)g², and the corrections divide by exactly these factors. Scaling: before learning
    rate and weight decay; not invariant to the scale of g, because of ε.

    >>> import torch
    >>> first_direction(torch.tensor([2.0, -1e-8, 0.0]))
    tensor([ 1.0000, -0.5000,  0.0000])
    """
    return grad / (grad.abs() + epsilon)
