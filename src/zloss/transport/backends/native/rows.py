"""The fused row pass as a function of tensors, and whether it was in use."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zloss.transport.backends.native.library import load_rows

_WORTH_IT = 2**14
"""Elements below which the ctypes call costs more than it saves. Below it the helper is not compiled either."""

RowPassName = Literal["c", "torch"]

_used = False
"""Set by the first fused pass of this process."""


def fused_exp_rows_(z_CV: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Overwrite fp32 logits on the CPU with E = exp(z − m); (m, S, ‖E‖), or None where the helper does not apply."""
    global _used
    # A subclass, such as a FakeTensor, may say that it is on the CPU and have no memory there.
    if type(z_CV) is not Tensor or z_CV.device.type != "cpu" or z_CV.dtype != torch.float32:
        return None
    if z_CV.numel() < _WORTH_IT or z_CV.stride(1) != 1:
        return None
    library = load_rows()
    if isinstance(library, str):
        return None
    # On the device of the logits: torch's default device may be another, whose addresses C cannot write to.
    sums = torch.empty((3, z_CV.shape[0]), dtype=torch.float32, device=z_CV.device)
    pointers = (row.data_ptr() for row in sums)
    library.zloss_exp_rows(z_CV.data_ptr(), z_CV.shape[0], z_CV.shape[1], z_CV.stride(0), *pointers)
    _used = True
    return sums[0], sums[1], sums[2]


def native_rows_in_use() -> bool:
    """Whether the compiled row pass has done any work in this process; without it the last digits of sums differ."""
    return _used


def row_pass_name() -> RowPassName:
    """`row_pass` of a provenance: "c" where the compiled row pass was in use, else "torch"."""
    return "c" if native_rows_in_use() else "torch"
