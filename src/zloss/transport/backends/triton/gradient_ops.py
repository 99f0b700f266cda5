"""Losses as custom ops with a gradient, so that autograd goes through them and torch.compile traces around them.

`row_loss` is the loss from logits, whose gradient is formed in backward; `with_gradients` is the loss from hidden states, whose
gradients were formed in forward.

Axes: T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zloss.transport.backends.chunked_autograd import refuse_double_backward
from zloss.transport.backends.triton.ops import row_source


@torch.library.custom_op("zloss::row_loss", mutates_args=())
def row_loss(
    logits: Tensor,
    value: Tensor,
    row_max: Tensor,
    index: Tensor,
    along_p: Tensor,
    along_target: Tensor,
    along_uniform: Tensor,
    vocab: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """`value` [T] with the gradient that the coefficients state: its backward is `row_source` times the upstream.

    The gradient is formed in the backward pass. So the logits are the only V-wide tensor that is kept for it, and the
    upstream gradient, one number or one per token, is applied before anything is rounded to the dtype of the logits.
    """
    return value.clone()


@row_loss.register_fake
def _(
    logits: Tensor,
    value: Tensor,
    row_max: Tensor,
    index: Tensor,
    along_p: Tensor,
    along_target: Tensor,
    along_uniform: Tensor,
    vocab: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    return torch.empty_like(value)


def _keep_for_source(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, _, *rows, vocab, scale, softcap = inputs
    ctx.save_for_backward(logits, *rows)
    ctx.shape_of_z = vocab, scale, softcap


def _source_of_loss(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward()
    logits, row_max, index, *coefficients = ctx.saved_tensors
    vocab, scale, softcap = ctx.shape_of_z
    p, target, uniform = (upstream * coefficient for coefficient in coefficients)
    grad = row_source(logits, row_max, index, p, target, uniform, vocab, scale, softcap, True, logits.dtype)
    return grad, *(None,) * 9


row_loss.register_autograd(_source_of_loss, setup_context=_keep_for_source)


@torch.library.custom_op("zloss::with_gradients", mutates_args=())
def with_gradients(
    value: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor:
    """`value`, a scalar, as a function of hidden, weight and bias whose gradients are known already."""
    return value.clone()


@with_gradients.register_fake
def _(
    value: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor:
    return torch.empty_like(value)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[4:])


def _scaled_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward()
    grads = (None if grad is None else grad * upstream for grad in ctx.saved_tensors)
    return None, *grads, None, None, None


with_gradients.register_autograd(_scaled_gradients, setup_context=_keep_gradients)
