"""The matrix products of the chunked losses.

A product of 16-bit factors has an fp32 result and fp32 sums. Where the device cannot do that (`native` is off) the
factors are converted first: a product of two 16-bit numbers is exact in fp32, so only the order of the sum differs.

Axes: M, N rows and columns of a result, K the axis that is summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.transport.backends.product_plan import ProductPlan


def multiply(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """out = left right, for factors of the dtype of `out`, or native 16-bit factors and an fp32 `out`."""
    if left_MK.dtype == out_MN.dtype:
        torch.mm(left_MK, right_KN, out=out_MN)
    elif torch.compiler.is_compiling():
        add_product_(out_MN, left_MK, right_KN, 0.0, 1.0)
    else:
        torch.mm(left_MK, right_KN, out_dtype=out_MN.dtype, out=out_MN)


def accumulate(
    total_MN: Tensor,
    left_MK: Tensor,
    right_KN: Tensor,
    plan: ProductPlan,
    *,
    first: bool = False,
    alpha: float = 1.0,
) -> None:
    """total = (0 if first, else total) + alpha·left right, in one call where the plan has an fp32 accumulator."""
    beta = 0 if first else 1
    if left_MK.dtype == total_MN.dtype:
        total_MN.addmm_(left_MK, right_KN, beta=beta, alpha=alpha)
    elif not plan.fp32_accumulator:
        product_MN = torch.empty_like(total_MN, memory_format=torch.contiguous_format)
        multiply(left_MK, right_KN, product_MN)
        if first:
            total_MN.zero_()
        total_MN.add_(product_MN, alpha=alpha)
    elif torch.compiler.is_compiling():
        add_product_(total_MN, left_MK, right_KN, float(beta), alpha)
    else:
        torch.addmm(total_MN, left_MK, right_KN, out_dtype=total_MN.dtype, beta=beta, alpha=alpha, out=total_MN)


@torch.library.custom_op("zloss::add_product_", mutates_args=("total",))
def add_product_(total: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    """total = beta·total + alpha·left right from 16-bit factors: one op to the compiler, whose own lowering of addmm with
    `out_dtype` fails (pytorch/pytorch#163880)."""
    if left.is_cuda and beta == 0 and alpha == 1:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, alpha=alpha, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta, alpha=alpha)


@add_product_.register_fake
def _(total: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    return None
