"""Checks that tensor and number arguments have to pass, and the precision in which a loss computes.

Checks that read values run on the CPU only: on an accelerator they would stall the stream, and a compiler that traces has
no values to read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from zloss.errors import DeviceError, DtypeError, InputError, ShapeError

_LARGEST = int(sys.float_info.max)


def is_number(value: object) -> bool:
    """An int or a float: not a bool, not a string such as "1e-4" from a config file, not an int beyond the range of floats."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and -_LARGEST <= value <= _LARGEST)


def check_tensors(*, optional: Mapping[str, object] | None = None, **required: object) -> None:
    """Every argument is a dense tensor that autograd may keep, and they are not all on the meta device.

    Those in `optional` may be None.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in {**required, **(optional or {})}.items():
        if value is None and name not in required:
            continue
        check_tensor(name, value)
        tensors[name] = value  # type: ignore[assignment]
    check_differentiable(**tensors)
    check_not_all_meta(**tensors)


def check_tensor(name: str, value: object) -> None:
    """A dense tensor: not sparse, nested or quantized, and not a number, list or array."""
    if not isinstance(value, Tensor):
        is_head = name == "weight" and isinstance(value, nn.Module)
        advice = ": pass `head.weight` (and `bias=head.bias`)" if is_head else ""
        raise DtypeError(f"`{name}` is expected to be a tensor, but got {type(value).__name__}{advice}.")
    if torch.compiler.is_compiling():
        return
    if value.is_nested:
        raise DtypeError(f"`{name}` is expected to be dense, but is a nested tensor: pad it, or flatten its values.")
    if value.layout != torch.strided:
        raise DtypeError(f"`{name}` is expected to be dense, but has layout {value.layout}: pass `{name}.to_dense()`.")
    if value.is_quantized:
        raise DtypeError(f"`{name}` is expected to be floating point, but is quantized: pass `{name}.dequantize()`.")


def check_float(name: str, tensor: Tensor) -> None:
    """fp64, fp32, bf16 or fp16."""
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise DtypeError(f"`{name}` is expected to be fp64, fp32, bf16 or fp16, but got {tensor.dtype}.")


def check_floating(name: str, value: object, dims: int = 1) -> None:
    """A dense floating-point tensor with at least `dims` axes."""
    check_tensor(name, value)
    assert isinstance(value, Tensor)
    check_float(name, value)
    if value.dim() < dims:
        raise ShapeError(f"`{name}` is expected to have at least {dims} axes, but has shape {list(value.shape)}.")


def check_same_device(**tensors: Tensor | None) -> None:
    if len({tensor.device for tensor in tensors.values() if tensor is not None}) > 1:
        listing = ", ".join(f"`{name}` on {tensor.device}" for name, tensor in tensors.items() if tensor is not None)
        raise DeviceError(f"all tensors are expected on one device, but got {listing}.")


def check_not_all_meta(**tensors: Tensor | None) -> None:
    """At least one of the tensors holds values."""
    if all(tensor.device.type == "meta" for tensor in tensors.values() if tensor is not None):
        raise DeviceError("all tensors are on the meta device, which holds no values: move them to a real device.")


def check_holds_values(**tensors: Tensor) -> None:
    """No tensor is on the meta device."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise DeviceError(f"`{name}` is on the meta device, which holds no values: move it to a real device.")


def check_mask(name: str, mask: Tensor) -> None:
    """A mask is of booleans, or of 0 and 1: an additive one, with −1e9 for what is left out, would be read the other way round.

    On an accelerator, integers are not read: additive masks are floating point.
    """
    if mask.dtype == torch.bool or torch.compiler.is_compiling() or not (mask.is_floating_point() or may_read(mask)):
        return
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel():
        raise InputError(
            f"`{name}` is expected to hold booleans, or 0 and 1, which is what counts, but got {other[0].item()}: turn an "
            f"additive mask into booleans with `{name} == 0`."
        )


def check_differentiable(**tensors: Tensor | None) -> None:
    """Autograd cannot save a tensor made in inference mode: where a gradient is needed, the error names the tensor."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    if not any(tensor.requires_grad for _, tensor in given):
        return
    for name, tensor in given:
        if tensor.is_inference():
            raise InputError(
                f"`{name}` was created under torch.inference_mode(), so no gradient can flow through this loss: pass "
                f"`{name}.clone()`, or create it under torch.no_grad()."
            )


def as_denominator(normalizer: float | Tensor, like: Tensor) -> Tensor:
    """An explicit `normalizer` as a 0-d tensor of the dtype and device of `like`; its value is checked on the CPU only."""
    if isinstance(normalizer, Tensor):
        if normalizer.numel() != 1:
            raise InputError(
                f"`normalizer` is expected to be a number or a 0-d tensor, but got shape {list(normalizer.shape)}."
            )
        denominator = normalizer.detach().to(like).reshape(())
        if may_read(denominator) and not bool(denominator >= 0):
            raise InputError(
                f"`normalizer` is expected to be a number ≥ 0 (the global token count), but got {normalizer.item()}."
            )
        return denominator
    if not is_number(normalizer) or not math.isfinite(normalizer) or normalizer < 0:
        raise InputError(
            f"`normalizer` is expected to be a finite number ≥ 0 (the global token count), but got {normalizer!r}."
        )
    return like.new_tensor(float(normalizer))


def may_read(tensor: Tensor) -> bool:
    """Whether reading values is free: the tensor is on the CPU, and no compiler is tracing."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def at_least_fp32(x: Tensor) -> Tensor:
    """fp64 stays fp64, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 where any operand is fp64, otherwise fp32: never a 16-bit statistic."""
    double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Nothing inside is rounded to the autocast dtype; free where autocast is off."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def autocast_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to which autocast would round the operands of F.linear; None if it leaves them, as it does fp64."""
    if dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
