"""Tensors as sums of 16-bit parts: what the products of "operand" and "split" take."""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.transport.backends.product_plan import ProductPlan
from zloss.transport.backends.products import wide_pass


def narrowed(value: Tensor, dtype: torch.dtype, parts: int) -> tuple[Tensor, ...]:
    """(hi,) or (hi, lo, …) in `dtype`: hi = round(value), lo = round(value − hi), and so on."""
    pieces = []
    for _ in range(parts - 1):
        pieces.append(value.to(dtype))
        value = value - pieces[-1]
    return *pieces, value.to(dtype)


def power_of_two(largest: Tensor, exponent: int) -> Tensor:
    """The power of two that scales `largest` to 2^exponent at most; 1 for 0 and for what is not finite."""
    usable = torch.isfinite(largest) & (largest > 0)
    steps = (exponent - torch.frexp(largest).exponent).clamp(-100, 100)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), steps), 1.0)


def exp_parts(e_CV: Tensor, plan: ProductPlan, out_NCV: Tensor | None = None) -> tuple[Tensor, ...]:
    """E times the plan's scale, as the products take it; E itself where it stays in compute precision.

    `out_NCV` [parts, C, V] receives the parts where it is given.
    """
    if not plan.parts:
        return (e_CV,)
    scaled_CV = e_CV
    if plan.exp_scale != 1:
        scaled_CV = e_CV * plan.exp_scale
        wide_pass("E scaled", (e_CV,), (scaled_CV,))
    if out_NCV is None:
        out_NCV = torch.empty((plan.parts, *e_CV.shape), dtype=plan.factor, device=e_CV.device)
    out_NCV[0].copy_(scaled_CV)
    wide_pass("E rounded", (scaled_CV,), (out_NCV[0],))
    if plan.parts == 2:
        rest_CV = scaled_CV - out_NCV[0]
        out_NCV[1].copy_(rest_CV)
        wide_pass("rest of E", (scaled_CV, out_NCV[0]), (rest_CV,))
        wide_pass("rest of E rounded", (rest_CV,), (out_NCV[1],))
    return tuple(out_NCV.unbind())


def applied_exp(e_CV: Tensor, plan: ProductPlan) -> Tensor:
    """E as the products see it, back in compute precision: the shape of the source that is really applied."""
    if not plan.parts:
        return e_CV
    parts = exp_parts(e_CV, plan)
    total_CV = parts[0].to(e_CV.dtype)
    for part_CV in parts[1:]:
        total_CV += part_CV
    return total_CV if plan.exp_scale == 1 else total_CV / plan.exp_scale
