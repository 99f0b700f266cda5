"""E W from logits one already has, as a custom op: the product that the gain needs.

Axes: T tokens, V vocabulary, D width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from zloss.transport.backends.chunk_sizes import chunk_bounds
from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.backends.product_plan import Products, plan_products
from zloss.transport.backends.row_work import empty_narrow
from zloss.transport.backends.triton.ops import by_rows, launch_source, narrow_exp_


@torch.library.custom_op("zloss::row_projection", mutates_args=())
def row_projection(
    logits: Tensor,
    row_max: Tensor,
    weight: Tensor,
    scale: float,
    softcap: float | None,
    chunk_size: int | None,
    products: str,
    memory_budget: int | None,
) -> Tensor:
    """(exp(z − m)·slope) W, which is S·WᵀCp of every row, [T, D] in fp32: chunks of rows, so no second [T, V] exists."""
    vocab = weight.shape[0]
    plan = plan_products(
        cast(Products, products), device_type=logits.device.type, hidden=weight.dtype, weight=weight.dtype
    )
    head = HeadProducts(weight, torch.float32, None, plan)
    out = logits.new_empty((logits.shape[0], weight.shape[1]), dtype=torch.float32)
    logits = by_rows(logits)
    bounds = chunk_bounds(
        logits.shape[0],
        vocab * (2 if plan.narrow else 4),
        chunk_size,
        device_type=plan.device_type,
        memory_budget=memory_budget,
    )
    for start, stop in bounds:
        chunk = slice(start, stop)
        narrow_CV = empty_narrow(plan, stop - start, vocab, logits)
        if narrow_CV is not None:
            narrow_exp_(logits[chunk], narrow_CV, row_max[chunk], plan.exp_scale, scale, softcap)
            out[chunk] = head.back_project(narrow_CV)
            continue
        ones, zeros = torch.ones_like(row_max[chunk]), torch.zeros_like(row_max[chunk])
        index = torch.zeros_like(ones, dtype=torch.int64)
        e_CV = torch.empty((stop - start, vocab), dtype=torch.float32, device=logits.device)
        launch_source(logits[chunk], e_CV, row_max[chunk], index, (ones, zeros, zeros), vocab, scale, softcap, True)
        out[chunk] = head.back_project(e_CV)
    return out


@row_projection.register_fake
def _(
    logits: Tensor,
    row_max: Tensor,
    weight: Tensor,
    scale: float,
    softcap: float | None,
    chunk_size: int | None,
    products: str,
    memory_budget: int | None,
) -> Tensor:
    return logits.new_empty((logits.shape[0], weight.shape[1]), dtype=torch.float32)
