"""The arithmetic a loss shows: fp64, fp32, or less."""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import Probe

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff u of each format."""
STEP = 2.0**-22
"""Relative step in the logits: four fp32 roundings, so that fp32 moves, but unevenly."""
SMOOTH = 3e-8
"""Roughness that fp64 stays below, and a part in fp32 exceeds unless its noise is lost in the rounding of fp64."""


def accepted_dtype(box: BlackBox, probe: Probe) -> torch.dtype:
    """fp64 where the loss takes it, else fp32; the error of the last attempt where it takes neither."""
    try:
        box(probe.logits_TV, probe.target_T, dtype=torch.float64)
        return torch.float64
    except LossCallError:
        box(probe.logits_TV, probe.target_T, dtype=torch.float32)
        return torch.float32


def computes_in(box: BlackBox, probe: Probe, dtype: torch.dtype) -> str:
    """The name of the format the gradients betray, a key of `UNIT`; of a mix of fp64 and fp32, fp32.

    16-bit arithmetic leaves gradients that 16-bit formats hold exactly. Along a line of steps a few fp32 roundings long
    fp64 gradients are smooth; where any part of the loss passes through fp32 they take the values of the fp32 grid.
    """
    base = box(probe.logits_TV, probe.target_T, dtype=dtype).grad_TV
    for name, narrow in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if _representable(base, narrow):
            return name
    if dtype != torch.float64:
        return "float32"
    return "float64" if _roughness(box, probe, base) < SMOOTH else "float32"


def _roughness(box: BlackBox, probe: Probe, base_TV: Tensor) -> float:
    """‖g₃ − 3g₂ + 3g₁ − g₀‖ / ‖g₃ − g₀‖ of the gradients g_k at z + k·d, with d about `STEP`·z; 1 where nothing moves.

    The third difference of a smooth gradient is O(d²) of the first, so what fp64 rounding leaves is about 1e-9. A part
    in fp32 that makes up the share σ of the slope leaves about σ u₃₂/`STEP`, be it the CE or a small penalty.
    """
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(probe.logits_TV.shape, generator=generator, dtype=torch.float64)
    step = STEP * direction * (1 + probe.logits_TV.abs())
    g1, g2, g3 = (box(probe.logits_TV + k * step, probe.target_T).grad_TV for k in (1, 2, 3))
    moved = float((g3 - base_TV).norm())
    return float((g3 - 3 * g2 + 3 * g1 - base_TV).norm()) / moved if moved > 0 else 1.0


def _representable(grad_TV: Tensor, narrow: torch.dtype) -> bool:
    """Whether nearly every entry survives the 16-bit format; random fp32 numbers do so once in 2^13 to 2^16."""
    # Tiny entries are left out: fp16 flushes them, whatever the arithmetic was.
    seen = grad_TV[grad_TV.abs() > 1e-4 * grad_TV.abs().max()]
    if seen.numel() < 32 or not bool(torch.isfinite(seen).all()):
        return False
    return float((seen.to(narrow).double() == seen).double().mean()) > 0.98
