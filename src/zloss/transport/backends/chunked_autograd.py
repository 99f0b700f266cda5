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

from zloss.errors import DoubleBackwardError
from zloss.transport.backends.chunks import ChunkedRun
from zloss.transport.backends.loss_parts import LossParts, parts_of, reduced
from zloss.transport.targets import Targets

Operands = tuple[Tensor | None, ...]
Run = Callable[[Operands, tuple[bool, ...], Tensor], ChunkedRun]
"""(operands, which gradients are wanted, weight of every token) → one pass over all chunks."""


def chunked_loss(operands: Operands, targets: Targets, vocab: int, run: Run, *, grad_enabled: bool) -> LossParts:
    """The loss as a differentiable function of its operands. `run` must not hold the operands: autograd keeps them."""
    box: list[ChunkedRun] = []
    loss: Tensor = _ChunkedLoss.apply(run, targets, grad_enabled, box, *operands)  # type: ignore[no-untyped-call]
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
        ctx: Any, run: Run, targets: Targets, grad_enabled: bool, box: list[ChunkedRun], *operands: Tensor | None
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
        return reduced(targets, done.cross_entropy_T + done.auxiliary_T)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        if ctx.ready:
            # On the CPU reading the upstream scalar costs nothing, and a factor of 1 saves a pass over every gradient.
            unit = upstream.device.type == "cpu" and float(upstream) == 1.0
            grads = [grad if grad is None or unit else grad.mul_(upstream) for grad in ctx.ready.pop()]
        else:
            weight_T = ctx.targets.weights.per_token * upstream
            grads = list(ctx.run(ctx.saved_tensors, ctx.needs_input_grad[4:], weight_T).gradients)
        return None, None, None, None, *grads
