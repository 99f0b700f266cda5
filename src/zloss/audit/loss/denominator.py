"""Which token count the CE and the Z part are divided by: seen from batches of different size and mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import Probe

CONSTANT = 2e-3
"""Relative spread below which weight × denominator counts as constant."""

NO_CE = 1e-9
"""A weight on CE below this is no CE: a penalty was audited alone."""

DENOMINATORS: dict[str, Callable[[int, int], float]] = {
    "valid": lambda valid, everything: float(valid),
    "all": lambda valid, everything: float(everything),
    "sum": lambda valid, everything: 1.0,
}

BATCHES = ((64, 64), (64, 16), (64, 40), (32, 32), (32, 12), (16, 16))
"""(tokens, valid tokens): size and mask vary independently."""


@dataclass(frozen=True)
class Weights:
    """What one batch showed: the weight on each CE and on each λ(v − c)²."""

    tokens: int
    valid: int
    ce: float
    z: float
    """λ·w_z; 0 where the loss has no Z."""
    ignored_z: float
    """The same on ignored tokens; 0 for a loss that leaves them alone."""


@dataclass(frozen=True)
class Denominators:
    """Names, and weight × denominator: the scale on CE, and λ."""

    ce: str
    z: str | None
    ce_scale: float
    coef: float | None
    weights: tuple[Weights, ...]
    masks_accepted: bool


Predict = Callable[[Probe], tuple[Tensor, Tensor]]
"""Probe → the CE source and the Z source per unit weight and λ = 1, both [T, V]."""


def find_denominators(
    box: BlackBox,
    rows: Probe,
    predict: Predict,
    *,
    has_z: bool,
    dtype: torch.dtype,
    eps: float,
    seed: int,
    nonzero_only: bool = False,
) -> Denominators:
    """Weigh every batch of `BATCHES` taken from the tokens of `rows` and name the counts that make the weights constant.

    `nonzero_only` leaves out entries whose gradient is exactly 0, for losses that filter.
    """
    generator = torch.Generator().manual_seed(seed)
    tolerance = max(CONSTANT, 8 * eps)
    seen: list[Weights] = []
    masks_accepted = True
    for tokens, valid in BATCHES:
        batch = rows.take(torch.randperm(len(rows.target_T), generator=generator)[:tokens])
        keep = torch.zeros(tokens, dtype=torch.bool)
        keep[torch.randperm(tokens, generator=generator)[:valid]] = True
        probe = batch.masked(keep)
        try:
            outcome = box(probe.logits_TV, probe.target_T, dtype=dtype)
        except LossCallError:
            if valid == tokens:
                raise
            masks_accepted = False
            continue
        if outcome.finite:
            seen.append(_weigh(probe, batch, keep, outcome.grad_TV, predict, has_z, nonzero_only))
    ce_name, ce_scale = _name([(w.valid, w.tokens, w.ce) for w in seen], masks_accepted, tolerance)
    if all(abs(w.ce) < NO_CE for w in seen):
        ce_name, ce_scale = "none", 0.0
    if not has_z:
        return Denominators(ce_name, None, ce_scale, None, tuple(seen), masks_accepted)
    z_name, coef = _name([(w.valid, w.tokens, w.z) for w in seen], masks_accepted, tolerance)
    return Denominators(ce_name, z_name, ce_scale, coef, tuple(seen), masks_accepted)


def _weigh(
    probe: Probe, unmasked: Probe, keep: Tensor, grad_TV: Tensor, predict: Predict, has_z: bool, nonzero_only: bool
) -> Weights:
    ce_TV, z_TV = predict(probe)
    # Saturated rows decide: their gradients carry no rounding.
    sigma = probe.noise_T.unsqueeze(-1)
    if nonzero_only:
        ce_TV, z_TV = (torch.where(grad_TV == 0, torch.zeros_like(x), x) for x in (ce_TV, z_TV))
    a, b, y = (x[keep] / sigma[keep] for x in (ce_TV, z_TV, grad_TV))
    valid, tokens = int(keep.sum()), len(keep)
    if not has_z:
        return Weights(tokens, valid, float((a * y).sum() / (a * a).sum()), 0.0, 0.0)
    gram = torch.tensor([[(a * a).sum(), (a * b).sum()], [(a * b).sum(), (b * b).sum()]], dtype=torch.float64)
    solution = torch.linalg.solve(gram, torch.stack([(a * y).sum(), (b * y).sum()]))
    ignored_z = 0.0
    if valid < tokens:
        shape = predict(unmasked)[1][~keep] / sigma[~keep]
        ignored_z = float((shape * grad_TV[~keep] / sigma[~keep]).sum() / (shape * shape).sum())
    return Weights(tokens, valid, float(solution[0]), float(solution[1]), ignored_z)


def _name(seen: list[tuple[int, int, float]], masks_accepted: bool, tolerance: float) -> tuple[str, float]:
    """The count whose product with the weight stays constant, and that constant."""
    best, scale, smallest = "other", float("nan"), float("inf")
    for name, count in DENOMINATORS.items():
        if name == "all" and not masks_accepted:
            continue
        products = torch.tensor([weight * count(valid, tokens) for valid, tokens, weight in seen], dtype=torch.float64)
        middle = float(products.median())
        spread = float((products.max() - products.min()) / abs(middle)) if middle else float("inf")
        if spread < smallest:
            best, scale, smallest = name, float(products.mean()), spread
    if smallest > tolerance:
        valid, _, weight = seen[0]
        return "other", weight * valid
    return ("mean" if best == "valid" and not masks_accepted else best), scale


def token_count(name: str, valid: int, everything: int) -> float:
    """The count behind a name; what has no count of its own is stated per valid token."""
    return DENOMINATORS.get(name, DENOMINATORS["valid"])(valid, everything)
