"""The softcap of logits, cap·tanh(z/cap), and its derivative 1 − tanh²(z/cap).

A masked logit stays masked: tanh would turn -inf into the finite −cap and return it to log Z. Its slope is 0.
The Triton kernels do the same in registers (`backends/triton/kernels.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def softcapped(z: Tensor, cap: float) -> Tensor:
    """cap·tanh(z/cap), differentiable."""
    return torch.where(torch.isneginf(z), z, cap * torch.tanh(z / cap))


def softcap_slope(capped: Tensor, cap: float) -> Tensor:
    """The derivative, from the capped logits: 1 − (capped/cap)²."""
    return (1 - (capped / cap) ** 2).clamp_min(0)


def softcap_(z: Tensor, slope: Tensor, cap: float) -> None:
    """Overwrite z with the capped logits and `slope` with the derivative, without a third buffer of that size."""
    masked = torch.isneginf(z)
    z.div_(cap).tanh_()
    torch.mul(z, z, out=slope)
    slope.neg_().add_(1)
    z.mul_(cap)
    z.masked_fill_(masked, -torch.inf)
