"""E and s∘h in 16 bits: what the products of "operand" take."""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.transport.backends.product_plan import ProductPlan


def power_of_two(largest: Tensor, exponent: int) -> Tensor:
    """The power of two that scales `largest` to 2^exponent at most; 1 for 0 and for what is not finite."""
    usable = torch.isfinite(largest) & (largest > 0)
    steps = (exponent - torch.frexp(largest).exponent).clamp(-100, 100)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), steps), 1.0)


def product_exp(e_CV: Tensor, plan: ProductPlan, out_CV: Tensor | None = None) -> Tensor:
    """E as the products take it: itself, or times the plan's scale in 16 bits, written to `out_CV` where it is given."""
    if not plan.narrow:
        return e_CV
    scaled_CV = e_CV if plan.exp_scale == 1 else e_CV * plan.exp_scale
    return scaled_CV.to(plan.factor) if out_CV is None else out_CV.copy_(scaled_CV)


def applied_exp(e_CV: Tensor, plan: ProductPlan) -> Tensor:
    """E as the products see it, back in compute precision: the shape of the source that is really applied."""
    if not plan.narrow:
        return e_CV
    applied_CV = product_exp(e_CV, plan).to(e_CV.dtype)
    return applied_CV if plan.exp_scale == 1 else applied_CV / plan.exp_scale
