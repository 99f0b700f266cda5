"""What a tensor argument has to be before anything is computed with it: dense, and allowed in this call."""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.errors import DeviceError, DtypeError, InputError, ShapeError


def check_tensor(name: str, value: object) -> None:
    """A dense tensor: not sparse, nested or quantized, and not a number, list or array."""
    if not isinstance(value, Tensor):
        raise DtypeError(f"`{name}` is expected to be a tensor, but got {type(value).__name__}.")
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
    """All given tensors are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"`{name}` on {device}" for name, device in devices.items())
        raise DeviceError(f"all tensors are expected on one device, but got {listing}.")


def check_not_all_meta(**tensors: Tensor | None) -> None:
    """At least one of the given tensors holds values."""
    if all(tensor.device.type == "meta" for tensor in tensors.values() if tensor is not None):
        raise DeviceError("all tensors are on the meta device, which holds no values: move them to a real device.")


def check_one_device(**tensors: Tensor | None) -> None:
    """All given tensors are on one device that holds values."""
    check_same_device(**tensors)
    check_not_all_meta(**tensors)


def check_differentiable(**tensors: Tensor | None) -> None:
    """Autograd cannot save a tensor that was made in inference mode: where a gradient is wanted, it is refused by name."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not any(tensor.requires_grad for tensor in given.values()):
        return
    for name, tensor in given.items():
        if tensor.is_inference():
            raise InputError(
                f"`{name}` was made under torch.inference_mode(), so no gradient can go through this loss: pass "
                f"`{name}.clone()`, or make it under torch.no_grad()."
            )


def check_holds_values(**tensors: Tensor) -> None:
    """No tensor is on the meta device: what is moved to the device of another argument has values to move."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise DeviceError(f"`{name}` is on the meta device, which holds no values: move it to a real device.")
