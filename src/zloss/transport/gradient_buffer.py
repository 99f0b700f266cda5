"""A buffer to which dW is added in place of a gradient of its own, such as Megatron's fp32 `main_grad`.

For "mean" and "sum" the gradients are formed in the forward pass, so dW is in the buffer after the loss was called, and
`weight.grad` stays None. The upstream gradient must be 1: factors of the loss (a loss scale, 1/micro-batches) go into
`normalizer` or `token_weight`. For "none" dW is added in the backward pass, with the upstream gradient of every token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.errors import DtypeError, InputError, ShapeError
from zloss.source.tensor_kind import check_same_device
from zloss.transport.options import HeadOptions
from zloss.transport.tensor_arguments import check_tensors


def check_gradient_buffer(buffer: Tensor | None, weight: Tensor, options: HeadOptions) -> None:
    """Refuse a buffer that could not take dW, or would take it twice."""
    if buffer is None:
        return
    check_tensors(weight=weight, optional={"weight_grad_buffer": buffer})
    check_same_device(weight_grad_buffer=buffer, weight=weight)
    if buffer.dtype != torch.float32 or weight.dtype == torch.float64:
        raise DtypeError(
            f"`weight_grad_buffer` is expected to be fp32 for a `weight` of fp32, bf16 or fp16, "
            f"but got {buffer.dtype} for {weight.dtype}."
        )
    if buffer.shape != weight.shape:
        raise ShapeError(
            f"`weight_grad_buffer` is expected to have the shape of `weight`, {list(weight.shape)}, "
            f"but got {list(buffer.shape)}."
        )
    if buffer.requires_grad:
        raise InputError("`weight_grad_buffer` is expected not to require a gradient: pass `buffer.detach()`.")
    if options.backend == "dense":
        raise InputError("`weight_grad_buffer` needs a chunked backend: use backend='auto', 'chunked' or 'triton'.")
    if torch.is_grad_enabled() and not weight.requires_grad:
        raise InputError("`weight_grad_buffer` was given for a `weight` that does not require a gradient.")
    if options.reduction != "none" and torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        raise InputError(
            "`weight_grad_buffer` does not go with activation checkpointing of the loss: the recomputation would add dW a "
            "second time. Call the loss outside the checkpointed part, or use reduction='none'."
        )


def require_unit_upstream(upstream: Tensor) -> None:
    """Refuse a backward pass whose upstream gradient is not 1: dW is in the buffer already."""
    if upstream.device.type == "cpu":
        if float(upstream) != 1.0:
            raise InputError(
                f"with `weight_grad_buffer` the upstream gradient of the loss is expected to be 1, but got "
                f"{float(upstream)!r}: dW was added in the forward pass. Put factors into `normalizer` or `token_weight`."
            )
    else:
        # Checked on the device: reading the value here would stall the stream.
        torch._assert_async(upstream == 1, "with `weight_grad_buffer` the upstream gradient must be 1")
