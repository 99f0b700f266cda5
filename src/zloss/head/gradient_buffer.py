"""`weight_grad_buffer`: dW is accumulated into a buffer of the caller, such as Megatron's `main_grad`, and not returned.

For "mean" and "sum" the gradients are formed in the forward pass, so dW is in the buffer as soon as the loss returns, and
`weight.grad` stays as it was. The upstream gradient must be 1: factors of the loss (a loss scale, 1/micro-batches) go into
`normalizer` or `token_weight`. For "none" dW is added in the backward pass, with the upstream gradient of every token.

`WeightGradient` (`products.py`) adds to the buffer; here is what is checked before and what the backward pass does about it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zloss.errors import DtypeError, InputError, ShapeError
from zloss.head.options import HeadOptions
from zloss.tensors import check_same_device, check_tensors


def check_gradient_buffer(buffer: Tensor, weight: Tensor, options: HeadOptions) -> None:
    """Refuse a buffer that could not take dW, or would take it twice."""
    check_tensors(weight=weight, weight_grad_buffer=buffer)
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
        raise InputError("`weight_grad_buffer` must not require a gradient: pass `buffer.detach()`.")
    if options.backend == "dense":
        raise InputError("`weight_grad_buffer` needs a chunked backend: use backend='auto', 'chunked' or 'triton'.")
    if torch.is_grad_enabled() and not weight.requires_grad:
        raise InputError("`weight_grad_buffer` was given for a `weight` that does not require a gradient.")
    if options.reduction != "none" and torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        raise InputError(
            "`weight_grad_buffer` cannot be combined with activation checkpointing of the loss: the recomputation would add dW a "
            "second time. Call the loss outside the checkpointed part, or use reduction='none'."
        )


def is_main_grad(buffer: Tensor, weight: Tensor | None) -> bool:
    """Whether `weight` is a parameter under Megatron's data parallelism and `buffer` its `main_grad`."""
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, Tensor) or not hasattr(weight, "grad_added_to_main_grad"):
        return False
    return main_grad.data_ptr() == buffer.data_ptr()


def added_to_main_grad(weight: Any) -> Tensor | None:
    """Called in the backward pass: tell Megatron that dW is in `main_grad`, and return what autograd gets instead.

    Megatron discards the gradient that autograd has for `weight`, unless `weight.zero_out_wgrad` is set. With a second use
    of the weight, such as a tied embedding, that gradient is more than our zeros.
    """
    weight.grad_added_to_main_grad = True
    task = torch._C._current_graph_task_id()
    if getattr(weight, "_zloss_backward", None) == task:  # another loss of this backward pass has returned zeros
        return None
    weight._zloss_backward = task
    if not getattr(weight, "zero_out_wgrad", False):

        def refuse_more_than_zeros(grad: Tensor) -> None:
            hook.remove()
            if any(grad.stride()):  # a sum: the zeros below have no strides
                raise InputError(
                    "`weight` also gets a gradient from another use, such as a tied embedding, which Megatron discards "
                    "when dW is in `main_grad`: set `weight.zero_out_wgrad = True`, as Megatron does for shared embeddings."
                )

        hook = weight.register_hook(refuse_more_than_zeros)
    zeros: Tensor = weight.new_zeros(()).expand_as(weight)
    return zeros


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
