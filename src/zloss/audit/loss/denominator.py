"""Which token count the CE and the Z part are divided by: seen from batches of different size and mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import TOKENS, Probe

CONSTANT = 2e-3
"""Relative spread below which weight × denominator counts as constant; N and N + 1 differ by 6 % at 16 tokens."""

NO_CE = 1e-9
"""A weight on CE below this is no CE: a penalty was audited alone."""

VISIBLE_CE = 1e-3
"""Norm of the unit CE source over a batch below which its weight cannot be read: every valid token is saturated."""

DRAWS = 16
"""Batches that are drawn at most until one shows CE."""

DENOMINATORS: dict[str, Callable[[int, int], float]] = {
    "valid": lambda valid, everything: float(valid),
    "all": lambda valid, everything: float(everything),
    "sum": lambda valid, everything: 1.0,
    "valid+1": lambda valid, everything: valid + 1.0,
    "all+1": lambda valid, everything: everything + 1.0,
    "valid-1": lambda valid, everything: max(valid - 1.0, 1.0),
    "sqrt_valid": lambda valid, everything: math.sqrt(valid),
    "sqrt_all": lambda valid, everything: math.sqrt(everything),
}
"""Name → count. The first three are the usual ones; the others are slips that have been seen."""

USUAL = ("valid", "all", "sum")
BATCHES = ((1, 1.0), (1, 0.25), (1, 0.625), (2, 1.0), (2, 0.375), (4, 1.0))
"""(divisor of the probe's rows, share that is valid): size and mask vary independently."""


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
    spread: bool = False
    """Whether the weights of the valid tokens differ; then `ce` is their mean."""
    shared: bool = True
    """Whether the Z of a token carries the weight of its CE."""
    misplaced: bool = False
    """Whether ignored tokens have a gradient and the weights of valid ones differ: the mask is not where the targets are."""


@dataclass(frozen=True)
class Denominators:
    """Names, and weight × denominator: the scale on CE, and λ."""

    ce: str
    z: str | None
    ce_scale: float
    coef: float | None
    weights: tuple[Weights, ...]
    masks_accepted: bool

    @property
    def named(self) -> bool:
        """Whether the counts of both parts are known ones."""
        return {self.ce, self.z or "none"} <= {*DENOMINATORS, "none"}

    @property
    def groups(self) -> bool:
        """Whether a mask alone makes the weights of tokens differ, as a mean of means of groups does."""
        whole = [w for w in self.weights if w.valid == w.tokens]
        return not any(w.spread for w in whole) and any(w.spread for w in self.weights)


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
    tokens: int = TOKENS,
) -> Denominators:
    """Weigh every batch of `BATCHES` taken from the tokens of `rows` and name the counts that make the weights constant.

    `nonzero_only` leaves out entries whose gradient is exactly 0, for losses that filter.
    """
    generator = torch.Generator().manual_seed(seed)
    tolerance = max(CONSTANT, 8 * eps)
    seen: list[Weights] = []
    masks_accepted = True
    sizes = dict.fromkeys((tokens // part, max(round(share * (tokens // part)), 1)) for part, share in BATCHES)
    for tokens, valid in sizes:
        batch, keep = _draw(rows, tokens, valid, predict, generator)
        probe = batch.masked(keep)
        try:
            outcome = box(probe.logits_TV, probe.target_T, dtype=dtype)
        except LossCallError:
            # A loss may refuse a size, or ignored targets.
            masks_accepted = masks_accepted and valid == tokens
            continue
        if outcome.finite:
            seen.append(_weigh(probe, batch, keep, outcome.grad_TV, predict, has_z, nonzero_only, eps))
    masks_accepted = masks_accepted and any(w.valid < w.tokens for w in seen)
    misplaced = any(w.misplaced for w in seen)
    whole = [w for w in seen if w.valid == w.tokens]
    everything = tuple(seen)
    if misplaced and whole:
        # A mask that falls on other tokens says nothing about counts: only the sizes do.
        seen, masks_accepted = whole, False
    if not seen:
        return Denominators("unknown", "unknown" if has_z else None, float("nan"), None, (), False)
    ce_name, ce_scale = _name([(w.valid, w.tokens, w.ce) for w in seen], masks_accepted, tolerance)
    if all(abs(w.ce) < NO_CE for w in seen):
        ce_name, ce_scale = "none", 0.0
    if not has_z:
        return Denominators(ce_name, None, ce_scale, None, everything, masks_accepted)
    z_name, coef = _name([(w.valid, w.tokens, w.z) for w in seen], masks_accepted, tolerance)
    return Denominators(ce_name, z_name, ce_scale, coef, everything, masks_accepted)


def _draw(rows: Probe, tokens: int, valid: int, predict: Predict, generator: torch.Generator) -> tuple[Probe, Tensor]:
    """A batch and its mask; drawn again while the valid tokens have no CE source, which would leave its weight unknown."""
    for _ in range(DRAWS):
        batch = rows.take(torch.randperm(len(rows.target_T), generator=generator)[:tokens])
        keep = torch.zeros(tokens, dtype=torch.bool)
        keep[torch.randperm(tokens, generator=generator)[:valid]] = True
        if float(predict(batch.masked(keep))[0][keep].norm()) > VISIBLE_CE:
            break
    return batch, keep


def _weigh(
    probe: Probe,
    unmasked: Probe,
    keep: Tensor,
    grad_TV: Tensor,
    predict: Predict,
    has_z: bool,
    nonzero_only: bool,
    eps: float,
) -> Weights:
    ce_TV, z_TV = predict(probe)
    # Saturated rows decide: their gradients carry no rounding.
    sigma = probe.noise_T.unsqueeze(-1)
    if nonzero_only:
        ce_TV, z_TV = (torch.where(grad_TV == 0, torch.zeros_like(x), x) for x in (ce_TV, z_TV))
    a, b, y = (x[keep] / sigma[keep] for x in (ce_TV, z_TV, grad_TV))
    valid, tokens = int(keep.sum()), len(keep)
    ignored_z = 0.0
    if has_z and valid < tokens:
        shape = predict(unmasked)[1][~keep] / sigma[~keep]
        ignored_z = float((shape * grad_TV[~keep] / sigma[~keep]).sum() / (shape * shape).sum())
    ce, z = _common(a, b if has_z else None, y)
    left = float((y - ce * a - z * b).norm()) / max(float(y.norm()), 1e-300)
    if nonzero_only or left <= max(1e-4, 64 * eps):
        return Weights(tokens, valid, ce, z, ignored_z)
    if float(grad_TV[~keep].norm()) > 1e-6 * float(grad_TV.norm()):
        # A label smoothing without a mask has a weight of its own beside that of CE.
        smooth = ((probe.reference.onehot_TV - probe.reference.uniform_TV) / sigma)[keep]
        x = torch.linalg.lstsq(
            torch.stack([t.flatten() for t in (a, b, smooth)], -1), y.flatten().unsqueeze(-1), driver="gelsd"
        ).solution
        ce_apart, z_apart, of_smooth = x.flatten().tolist()
        if float((y - ce_apart * a - z_apart * b - of_smooth * smooth).norm()) <= max(1e-4, 64 * eps) * float(y.norm()):
            return Weights(tokens, valid, ce_apart, z_apart, ignored_z)
        return Weights(tokens, valid, ce, z, ignored_z, misplaced=True)
    apart = _token_by_token(a, b if has_z else None, y, sigma[keep].squeeze(-1))
    if apart is None:
        return Weights(tokens, valid, ce, z, ignored_z)
    ce, z, left_apart, shared = apart
    # Weights per token explain what common ones do not, or they are no explanation.
    if left_apart > 0.1 * left:
        ce, z = _common(a, b if has_z else None, y)
        return Weights(tokens, valid, ce, z, ignored_z)
    return Weights(tokens, valid, ce, z, ignored_z, spread=True, shared=shared)


def _common(a: Tensor, b: Tensor | None, y: Tensor) -> tuple[float, float]:
    """One weight on CE and one on Z for all rows."""
    aa, ay = float((a * a).sum()), float((a * y).sum())
    if b is None:
        return ay / max(aa, 1e-300), 0.0
    gram = torch.tensor([[aa, (a * b).sum()], [(a * b).sum(), (b * b).sum()]], dtype=torch.float64)
    right = torch.tensor([ay, float((b * y).sum())], dtype=torch.float64)
    return tuple(torch.linalg.lstsq(gram, right.unsqueeze(-1), driver="gelsd").solution.flatten().tolist())


def _token_by_token(a: Tensor, b: Tensor | None, y: Tensor, noise: Tensor) -> tuple[float, float, float, bool] | None:
    """Mean weight on CE, weight on Z, the share left over, and whether Z carries the weight of its CE."""
    aa = (a * a).sum(-1)
    if b is None:
        rows = aa > 1e-6 * aa.max()
        w = (a * y).sum(-1)[rows] / aa[rows]
        left = float((y[rows] - w.unsqueeze(-1) * a[rows]).norm()) / max(float(y.norm()), 1e-300)
        return float(w.mean()), 0.0, left, True
    bb, ab = (b * b).sum(-1), (a * b).sum(-1)
    determinant = aa * bb - ab * ab
    # Where p is onehot(y) a CE has no gradient, and its weight cannot be read.
    rows = (determinant > 1e-4 * aa * bb) & (aa > 1e-6 * aa.max())
    if int(rows.sum()) < 4:
        return None
    ay, by = (a * y).sum(-1), (b * y).sum(-1)
    w = (ay * bb - by * ab) / determinant.clamp(min=1e-300)
    mean = float(w[rows].mean())
    # Saturated rows carry no rounding: they alone decide on λ where there are enough of them.
    quiet = rows & (noise == 1)
    rows = quiet if int(quiet.sum()) >= 4 else rows
    w, a, b, y = w[rows].unsqueeze(-1), a[rows], b[rows], y[rows]
    rest, size = y - w * a, max(float(y.norm()), 1e-300)
    ways = []
    for shared, column in ((True, w * b), (False, b)):
        z = float((column * rest).sum() / (column * column).sum().clamp(min=1e-300))
        ways.append((float((rest - z * column).norm()) / size, z * (mean if shared else 1.0), shared))
    left, z, shared = min(ways)
    return mean, z, left, shared


def _name(seen: list[tuple[int, int, float]], masks_accepted: bool, tolerance: float) -> tuple[str, float]:
    """The count whose product with the weight stays constant, and that constant."""
    best, scale, smallest = "other", float("nan"), float("inf")
    for name, count in DENOMINATORS.items():
        if name in ("all", "all+1", "sqrt_all") and not masks_accepted:
            continue
        products = torch.tensor([weight * count(valid, tokens) for valid, tokens, weight in seen], dtype=torch.float64)
        middle = float(products.median())
        spread = float((products.max() - products.min()) / abs(middle)) if middle else float("inf")
        # An unusual count is named only where it is clearly the better one.
        if spread < (smallest if name in USUAL else min(0.1 * smallest, smallest - 1e-12)):
            best, scale, smallest = name, float(products.mean()), spread
    if smallest > tolerance:
        valid, _, weight = seen[0]
        return "other", weight * valid
    if not masks_accepted:
        best = {"valid": "mean", "valid+1": "mean+1", "valid-1": "mean-1", "sqrt_valid": "sqrt_mean"}.get(best, best)
    return best, scale


def token_count(name: str, valid: int, everything: int) -> float:
    """The count behind a name; what has no count of its own is stated per valid token."""
    unmasked = {"mean+1": "valid+1", "mean-1": "valid-1", "sqrt_mean": "sqrt_valid"}
    return DENOMINATORS.get(unmasked.get(name, name), DENOMINATORS["valid"])(valid, everything)
