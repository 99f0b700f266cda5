"""The autograd function of losses that are computed in chunks.

For a scalar loss the gradients are formed in the forward pass, while a chunk's E is at hand, and multiplied by the one
upstream number in the backward pass. They are handed out once, so that the receiver may change them in place; a second
backward over a retained graph recomputes them. For reduction="none" the backward pass recomputes every chunk, because
only then the upstream gradient of every token is known.

Axes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zloss.errors import DoubleBackwardError, InputError
from zloss.transport.backends.chunks import ChunkedRun
from zloss.transport.backends.loss_parts import LossParts, parts_of, reduced
from zloss.transport.gradient_buffer import added_to_main_grad, require_unit_upstream
from zloss.transport.targets import Targets

Operands = tuple[Tensor | None, ...]
Run = Callable[[Operands, tuple[bool, ...], Tensor], ChunkedRun]
"""(operands, which gradients are wanted, weight of every token) → one pass over all chunks."""


def chunked_loss(
    operands: Operands,
    targets: Targets,
    vocab: int,
    run: Run,
    *,
    grad_enabled: bool,
    added_elsewhere: bool = False,
    in_main_grad: bool = False,
) -> LossParts:
    """The loss as a differentiable function of its operands. `run` must not hold the operands: autograd keeps them.

    `added_elsewhere`: `run` adds a gradient to a buffer of the caller, so it must run once, with the true weights.
    `in_main_grad`: that buffer is the `main_grad` of the second operand, a parameter of Megatron.
    """
    box: list[ChunkedRun] = []
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        run, targets, grad_enabled, added_elsewhere, in_main_grad, box, *operands
    )
    return parts_of(loss, box[0], targets, vocab)


def wanted_gradients(operands: Operands, *, grad_enabled: bool) -> tuple[bool, ...]:
    """`grad_enabled` is that of the caller: inside an autograd.Function grad mode is always off."""
    return tuple(grad_enabled and operand is not None and operand.requires_grad for operand in operands)


def narrow(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient as it waits for backward: bf16 in bf16, as small as the parameter; fp16 in fp32, because the loss scale
    that keeps it from underflowing comes in backward."""
    if grad is None or like is None:
        return None
    return grad if like.dtype == torch.float16 else grad.to(like.dtype)


def refuse_double_backward() -> None:
    """Called in backward, where grad mode is on only for create_graph=True."""
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            "this backend computes first derivatives only, but backward was called with create_graph=True: "
            "use backend='dense' for second derivatives."
        )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        targets: Targets,
        grad_enabled: bool,
        added_elsewhere: bool,
        in_main_grad: bool,
        box: list[ChunkedRun],
        *operands: Tensor | None,
    ) -> Tensor:
        scalar = targets.weights.reduction != "none"
        wanted = wanted_gradients(operands, grad_enabled=grad_enabled and scalar)
        done = run(operands, wanted, targets.weights.per_token)
        box.append(done)
        ctx.ready = []
        if any(wanted):
            ctx.ready.append([narrow(grad, like) for grad, like in zip(done.gradients, operands, strict=True)])
        done.gradients = ()
        # The operands are in save_for_backward alone, where checkpointing and version checks see them.
        ctx.save_for_backward(*operands)
        ctx.run, ctx.targets = run, targets
        ctx.once = added_elsewhere and scalar
        ctx.megatron_weight = operands[1] if in_main_grad else None
        return reduced(targets, done.cross_entropy_T + done.auxiliary_T)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        if ctx.once:
            require_unit_upstream(upstream)
            if not ctx.ready:
                raise InputError("backward ran twice, but `weight_grad_buffer` takes dW once per call of the loss.")
        if ctx.ready:
            # On the CPU reading the upstream scalar costs nothing, and a factor of 1 saves a pass over every gradient.
            unit = upstream.device.type == "cpu" and float(upstream) == 1.0
            grads = [grad if grad is None or unit else grad.mul_(upstream) for grad in ctx.ready.pop()]
        else:
            weight_T = ctx.targets.weights.per_token * upstream
            grads = list(ctx.run(ctx.saved_tensors, ctx.needs_input_grad[6:], weight_T).gradients)
        if ctx.megatron_weight is not None:
            grads[1] = added_to_main_grad(ctx.megatron_weight)
        return None, None, None, None, None, None, *grads
