"""Checks that every tensor argument of a loss has to pass, and the precision in which the loss computes.

Checks that read values run on the CPU only: on an accelerator they would stall the stream, and a compiler that traces
has no values to read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zloss.source.tensor_kind import check_differentiable, check_not_all_meta, check_tensor


def check_tensors(*, optional: Mapping[str, object] | None = None, **required: object) -> None:
    """Every argument is a dense tensor that autograd may keep, and they are not all on the meta device.

    Those in `optional` may be None.
    """
    given = {**required, **{name: value for name, value in (optional or {}).items() if value is not None}}
    for name, value in given.items():
        check_tensor(name, value)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    check_differentiable(**tensors)
    check_not_all_meta(**tensors)


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
