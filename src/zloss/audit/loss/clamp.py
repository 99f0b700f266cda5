"""Clamped logits: beyond the bound the gradient is exactly 0, just inside it is whole. Found by a ladder of flat rows."""

from __future__ import annotations

import math

import torch

from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import Space, allowed
from zloss.audit.loss.warp import Warp

HIGHEST = 4096.0
ROUNDS = 8


def find_clamp(box: BlackBox, space: Space, dtype: torch.dtype) -> Warp | None:
    """The bounds as a warp; None where logits up to ±4096 all have a gradient."""
    high, low = (_bound(box, space, dtype, sign) for sign in (1.0, -1.0))
    if high is None and low is None:
        return None
    return Warp(low=-math.inf if low is None else low, high=math.inf if high is None else high)


def _bound(box: BlackBox, space: Space, dtype: torch.dtype, sign: float) -> float | None:
    """The largest |level| on one side whose flat row has a gradient, refined `ROUNDS` times."""
    levels = torch.cat([torch.zeros(1), torch.logspace(-1, math.log10(HIGHEST), space.tokens - 1)]).double()
    inside = 0.0
    for _ in range(ROUNDS):
        norms = _norms(box, space, dtype, sign * levels)
        if norms is None or norms[0] == 0:
            return None
        silent = (norms == 0).nonzero().flatten()
        if not len(silent):
            return None
        first = int(silent[0])
        # A softcap's gradient fades; a clamp's is whole up to its bound.
        if first == 0 or bool((norms[first:] != 0).any()) or norms[first - 1] < 0.2 * norms[0]:
            return None
        inside, outside = float(levels[first - 1]), float(levels[first])
        if outside - inside < 1e-9 * max(outside, 1.0):
            break
        levels = torch.linspace(inside, outside, space.tokens, dtype=torch.float64)
    # A bound is a written number: the shortest one within the last bracket.
    for digits in range(12):
        if inside - 1e-12 * max(inside, 1.0) <= (short := round(outside, digits)) <= outside:
            return sign * short
    return sign * inside


def _norms(box: BlackBox, space: Space, dtype: torch.dtype, levels_T: torch.Tensor) -> torch.Tensor | None:
    logits = levels_T.unsqueeze(-1).expand(-1, space.width).clone()
    target = allowed(torch.arange(len(levels_T)) % space.lanes, space.lanes, space.avoid)
    try:
        outcome = box(logits, target, dtype=dtype)
    except LossCallError:
        return None
    return outcome.grad_TV.norm(dim=-1) if outcome.finite else None
