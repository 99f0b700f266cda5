"""Checks that every tensor argument of a loss has to pass, and the precision in which the loss computes.

Checks that read values run on the CPU only: on an accelerator they would stall the stream, and a compiler that traces
has no values to read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zloss.errors import DeviceError, DtypeError
from zloss.source.tensor_kind import check_differentiable, check_tensor


def check_tensors(*, optional: Mapping[str, object] | None = None, **required: object) -> None:
    """Every argument is a dense tensor that autograd may keep, and they are not all on the meta device.

    Those in `optional` may be None.
    """
    given = {**required, **{name: value for name, value in (optional or {}).items() if value is not None}}
    for name, value in given.items():
        check_tensor(name, value)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    check_differentiable(**tensors)
    devices = {tensor.device.type for tensor in tensors.values()}
    if devices == {"meta"}:
        raise DeviceError("all tensors are on the meta device, which holds no values: move them to a real device.")


def check_float(name: str, tensor: Tensor) -> None:
    """fp64, fp32, bf16 or fp16."""
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise DtypeError(f"`{name}` is expected to be fp64, fp32, bf16 or fp16, but got {tensor.dtype}.")


def check_same_device(**tensors: Tensor | None) -> None:
    """All given tensors are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"`{name}` on {device}" for name, device in devices.items())
        raise DeviceError(f"all tensors are expected on one device, but got {listing}.")


def may_read(tensor: Tensor) -> bool:
    """Whether reading values is free: the tensor is on the CPU, and no compiler is tracing."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 where any operand is fp64, otherwise fp32: never a 16-bit statistic."""
    double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def autocast_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to which autocast would round the operands of F.linear; None where it leaves them, as it does fp64."""
    if dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
