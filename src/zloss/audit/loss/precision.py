"""The arithmetic a loss shows: fp64, fp32, or less."""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import Probe

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff u of each format."""


def accepted_dtype(box: BlackBox, probe: Probe) -> torch.dtype:
    """fp64 where the loss takes it, else fp32; the error of the last attempt where it takes neither."""
    try:
        box(probe.logits_TV, probe.target_T, dtype=torch.float64)
        return torch.float64
    except LossCallError:
        box(probe.logits_TV, probe.target_T, dtype=torch.float32)
        return torch.float32


def computes_in(box: BlackBox, probe: Probe, dtype: torch.dtype) -> str:
    """The name of the format the gradients betray, a key of `UNIT`.

    16-bit arithmetic leaves gradients that 16-bit formats hold exactly. fp64 arithmetic resolves steps of 1e-9 in the
    logits and answers twice the step with twice the change; fp32 cannot see them.
    """
    base = box(probe.logits_TV, probe.target_T, dtype=dtype).grad_TV
    for name, narrow in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if _representable(base, narrow):
            return name
    if dtype != torch.float64:
        return "float32"
    generator = torch.Generator().manual_seed(1)
    step = 1e-9 * torch.randn(probe.logits_TV.shape, generator=generator, dtype=torch.float64)
    once = box(probe.logits_TV + step, probe.target_T).grad_TV - base
    twice = box(probe.logits_TV + 2 * step, probe.target_T).grad_TV - base
    linear = float(once.norm()) > 0 and float((twice - 2 * once).norm()) < 0.1 * float(twice.norm())
    return "float64" if linear else "float32"


def _representable(grad_TV: Tensor, narrow: torch.dtype) -> bool:
    """Whether nearly every entry survives the 16-bit format; random fp32 numbers do so once in 2^13 to 2^16."""
    # Tiny entries are left out: fp16 flushes them, whatever the arithmetic was.
    seen = grad_TV[grad_TV.abs() > 1e-4 * grad_TV.abs().max()]
    if seen.numel() < 32 or not bool(torch.isfinite(seen).all()):
        return False
    return float((seen.to(narrow).double() == seen).double().mean()) > 0.98
