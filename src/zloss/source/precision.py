"""The precision of statistics: fp32 at least, whatever the tensors they are taken of are stored in."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """fp64 stays fp64, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()
