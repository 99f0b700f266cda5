"""Directional derivatives of the loss's own scalar beside those of its own gradient.

Cross-entropy does not see a common shift, so along it even a tiny Z stands alone; and λ(log Z − c)² is quadratic in the
shift, so central differences are exact at steps far above rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.evidence import Evidence
from zloss.audit.loss.outcome import Outcome
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.precision import UNIT
from zloss.audit.loss.probes import Probe


@dataclass(frozen=True)
class Slope:
    """One direction: the scalar's own derivative, the gradient's, and their relative mismatch beyond rounding."""

    words: str
    difference: float
    gradient: float
    mismatch: float


def slopes(evidence: Evidence) -> Iterator[Slope]:
    """Ordinary logits along the gradient, at random and along a shift; saturated ones along a shift and the top logit."""
    ident = evidence.ident
    # Large steps presume a quadratic. Where the penalty is not one, stay local, and off the grid where kinks would lie.
    known = ident.selection.how in ("none", "explained", "filtered", "rounded")
    fixed = any(penalty.candidate.fixed for penalty in ident.model.penalties)
    trusted = ident.trusted or ident.selection.how == "rounded"
    quadratic = known and trusted and not fixed and ident.model.warp.identity
    steps = {"mixed": 4.0, "saturated": 4.0, "wide": 32.0} if quadratic else dict.fromkeys(ident.probes, 0.05)
    at = {name: (ident.probes[name], outcome) for name, outcome in ident.outcomes.items()}
    if not quadratic:
        moved = {name: probe.shifted(0.13) for name, (probe, _) in at.items()}
        at = {name: (probe, evidence.call(probe)) for name, probe in moved.items()}
    mixed_probe, mixed = at["mixed"]
    r = mixed_probe.reference
    # A tied maximum has no derivative for losses that use it; 2 · 0.05 both ways cannot bridge the 0.25 of the grid.
    smooth = ((r.inside_TV == r.max_T.unsqueeze(-1)).sum(-1) == 1).unsqueeze(-1)
    largest = float((mixed.grad_TV * smooth).abs().max())
    if largest > 0:
        yield from _slope(evidence, at["mixed"], smooth * mixed.grad_TV / largest, 0.05, "its own gradient")
    if ident.denominators.masks_accepted:
        yield from _with_ignored_tokens(evidence, mixed_probe, smooth)
    generator = torch.Generator().manual_seed(evidence.seed + 2)
    random = smooth * torch.randn(r.logits_TV.shape, generator=generator, dtype=torch.float64)
    yield from _slope(evidence, at["mixed"], random / random.abs().max(), 0.05, "a random direction")
    for name, here in at.items():
        r = here[0].reference
        shift = torch.zeros_like(r.logits_TV)
        shift[:, : r.lanes] = 1.0
        yield from _slope(evidence, here, shift, steps[name], "a common shift of the logits")
        if name != "mixed":
            top = r.argmax_TV(split=False)
            yield from _slope(evidence, here, top, steps[name] / 2, "the largest logit")


def _with_ignored_tokens(evidence: Evidence, probe: Probe, smooth: Tensor) -> Iterator[Slope]:
    """Along the gradient of a batch with ignored tokens: value and gradient may have denominators of their own."""
    masked = probe.masked(torch.arange(len(probe.target_T)) % 3 > 0)
    outcome = evidence.attempt(masked)
    if isinstance(outcome, str) or not outcome.finite:
        return
    largest = float((outcome.grad_TV * smooth).abs().max())
    if largest > 0:
        direction = smooth * outcome.grad_TV / largest
        yield from _slope(evidence, (masked, outcome), direction, 0.05, "its own gradient, with tokens ignored")


def _slope(
    evidence: Evidence, here: tuple[Probe, Outcome], direction: Tensor, step: float, words: str
) -> Iterator[Slope]:
    """The better of two steps: a kink within the larger one, such as a clamp has, disagrees there and not in the smaller."""
    ways = [one for k in (1.0, 1 / 16) if (one := _slope_at(evidence, here, direction, k * step, words)) is not None]
    if ways:
        yield min(ways, key=lambda slope: slope.mismatch)


def _slope_at(
    evidence: Evidence, here: tuple[Probe, Outcome], direction: Tensor, step: float, words: str
) -> Slope | None:
    ident = evidence.ident
    probe, outcome = here
    try:
        values = [
            evidence.box.values(probe.logits_TV + k * step * direction, probe.target_T, dtype=ident.dtype)
            for k in (-2, -1, 1, 2)
        ]
    except LossCallError:
        return None
    if not all(abs(value) < float("inf") for value in values):
        return None
    low2, low1, high1, high2 = values
    difference = (8 * (high1 - low1) - (high2 - low2)) / (12 * step)
    gradient = float((outcome.grad_TV * direction).sum())
    # The scalar may come back in a narrower format even where the gradient is fp64.
    unit = max(ident.eps, UNIT.get(str(outcome.dtype).removeprefix("torch."), 0.0))
    rounding = 16 * unit * max(abs(value) for value in values) / step
    # The gradient is rounded too: where CE cancels along the direction, what is left of it is noise of this size.
    entries_T = (outcome.grad_TV * direction).abs().sum(-1)
    rounding += 2 * unit * float((probe.noise_T * entries_T).sum())
    scale = max(abs(difference), abs(gradient))
    beyond = max(abs(difference - gradient) - rounding, 0.0)
    # Rounding that hides half of the slope says nothing about it.
    if step < 0.05 and rounding > 1e-3 * scale:
        return None
    return Slope(words, difference, gradient, beyond / scale if scale else 0.0)
