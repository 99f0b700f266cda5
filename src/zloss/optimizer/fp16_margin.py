"""How far a static loss scale can go before fp16 overflows: κ_max, κ_min and Ψ_κ (paper eq:overflow_proxy).

Of each gradient only ‖g‖_∞ is needed. A NaN or an infinity in it is an overflow at every scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zloss.errors import InputError

FP16_MAX = 65504.0
"""M_16, the largest finite fp16 number."""
STATIC_SCALES = (256, 1024, 4096, 16384, 65536)
"""The scales the paper audits."""


@dataclass(frozen=True)
class Fp16Margin:
    """Loss-scale headroom over audited batches."""

    kappa_max: tuple[float, ...]
    """Largest safe static scale of every batch; 0 where the gradient is not finite, inf where it is zero."""
    kappa_min: float
    """The smallest of them."""
    psi: dict[int, float]
    """Ψ_κ by static scale κ: the fraction of batches whose scaled gradient leaves the fp16 range."""
    nonfinite: int
    """Batches whose gradient holds NaN or Inf."""


def max_safe_scale(grad_inf: float) -> float:
    """κ_max = M_16 / ‖g‖_∞; 0 for a gradient that is not finite, inf for a zero one.

    >>> max_safe_scale(5.77), max_safe_scale(float("nan"))
    (11352.51..., 0.0)
    """
    if not math.isfinite(grad_inf):
        return 0.0
    return FP16_MAX / grad_inf if grad_inf > 0 else math.inf


def overflows(grad_inf: float, scale: float) -> bool:
    """κ‖g‖_∞ > M_16, strictly, or a gradient that is not finite."""
    return not math.isfinite(grad_inf) or scale * grad_inf > FP16_MAX


def fp16_margin(grad_infs: Sequence[float], scales: Sequence[int] = STATIC_SCALES) -> Fp16Margin:
    """The margin of a sequence of batches, each known by the ‖g‖_∞ of its gradient."""
    if not grad_infs:
        raise InputError("an fp16 margin needs the gradient of at least one batch, but got none.")
    kappa = tuple(max_safe_scale(value) for value in grad_infs)
    psi = {scale: sum(overflows(value, scale) for value in grad_infs) / len(grad_infs) for scale in scales}
    return Fp16Margin(kappa, min(kappa), psi, sum(not math.isfinite(value) for value in grad_infs))
