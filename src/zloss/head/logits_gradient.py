"""The gradient of given logits, formed in the backward pass: from the logits and a few numbers per token.

The upstream gradient, one number or one per token, is applied to these numbers. So the gradient is rounded once to the dtype of
the logits, a loss scale comes before that, and the logits are the only V-wide tensor kept between forward and backward.

Axes: T tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zloss.errors import DoubleBackwardError
from zloss.head.options import chunk_bounds
from zloss.head.rows import softcap_, source_
from zloss.objectives import Coefficients


class RowSource(NamedTuple):
    """The source of every row: along_p·exp(z − m) − along_target·onehot(target) − along_uniform/V."""

    row_max: Tensor
    """m."""
    target: Tensor
    """int64, negative at rows that count nothing."""
    along_p: Tensor
    along_target: Tensor
    along_uniform: Tensor | None


@torch.library.custom_op("zloss::row_loss", mutates_args=())
def row_loss(
    logits: Tensor,
    value: Tensor,
    row_max: Tensor,
    index: Tensor,
    along_p: Tensor,
    along_target: Tensor,
    along_uniform: Tensor | None,
    vocab: int,
    scale: float,
    softcap: float | None,
    chunk_size: int | None,
    memory_budget: int | None,
    triton: bool,
) -> Tensor:
    """`value`, one number or one per row, with the gradient that a `RowSource` states at the logits [T, V].

    `vocab` columns are inside log Z; z = scale·logits, softcapped if requested, and the scale of the gradient is in the
    coefficients. `triton`: whether its kernel forms the source.
    """
    return value.clone()


row_loss.register_fake(lambda logits, value, *_: torch.empty_like(value))


def _keep_for_source(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, _, *rows = inputs[:7]
    ctx.save_for_backward(logits, *rows)
    ctx.options = inputs[7:]


def _source_of_loss(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward()
    logits, row_max, index, *coefficients = ctx.saved_tensors
    vocab, scale, softcap, chunk_size, memory_budget, triton = ctx.options
    p, target = (upstream * each for each in coefficients[:2])
    uniform = None if coefficients[2] is None else upstream * coefficients[2]
    if triton:
        from zloss.head.triton import row_source as kernel

        uniform = torch.zeros_like(p) if uniform is None else uniform / vocab
        grad = kernel(logits, row_max, index, p, target, uniform, vocab, scale, softcap, True, logits.dtype)
    else:
        shape = vocab, scale, softcap, chunk_size, memory_budget
        grad = chunked_source(logits, row_max, index, p, target, uniform, *shape)
    return grad, *(None,) * 12


row_loss.register_autograd(_source_of_loss, setup_context=_keep_for_source)


@torch.library.custom_op("zloss::chunked_source", mutates_args=())
def chunked_source(
    logits: Tensor,
    row_max: Tensor,
    index: Tensor,
    along_p: Tensor,
    along_target: Tensor,
    along_uniform: Tensor | None,
    vocab: int,
    scale: float,
    softcap: float | None,
    chunk_size: int | None,
    memory_budget: int | None,
) -> Tensor:
    """The source through the softcap as [T, V] in the dtype of the logits; 0 in padding columns and rows that count nothing."""
    out_TV, buffers = torch.empty_like(logits), 1 if softcap is None else 2
    out_TV[:, vocab:] = 0
    bounds = chunk_bounds(
        logits.shape[0] if vocab else 0,  # a rank may hold no column
        vocab * buffers * along_p.dtype.itemsize,
        chunk_size,
        device_type=logits.device.type,
        memory_budget=memory_budget,
    )
    buffers_BCV = along_p.new_empty((buffers, bounds[0][1] if bounds else 0, vocab))
    for start, stop in bounds:
        chunk = slice(start, stop)
        z_CV, slope_CV, index_C = buffers_BCV[0, : stop - start], None, index[chunk]
        z_CV.copy_(logits[chunk, :vocab])
        if scale != 1:
            z_CV.mul_(scale)
        if softcap is not None:
            slope_CV = buffers_BCV[1, : stop - start]
            softcap_(z_CV, slope_CV, softcap)
        e_CV = z_CV.sub_(row_max[chunk].unsqueeze(1)).exp_()
        g_C = None if along_uniform is None else along_uniform[chunk]
        coefficients = Coefficients(along_p[chunk], along_target[chunk], g_C)
        out_TV[chunk, :vocab] = source_(e_CV, index_C.clamp_min(0), index_C >= 0, coefficients, slope_CV)
    return out_TV


chunked_source.register_fake(lambda logits, *_: torch.empty_like(logits))


def refuse_double_backward() -> None:
    """Called in backward, where grad mode is on only for create_graph=True."""
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            "this backend computes first derivatives only, but backward was called with create_graph=True: "
            "use backend='dense' for second derivatives."
        )
