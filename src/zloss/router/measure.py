"""What a router Z-loss really applies, recovered from parameter gradients.

A logged scalar cannot be trusted: side-channel scalers inject gradients that the scalar never shows, and a trainer may log a
layer mean but train on a layer sum. The gradient with the loss on minus the gradient with it off is

    ∇(on) − ∇(off) = Σ_l Σ_{t in l} λα_l ∇(log Z_{t,l} − c)²

which is linear in the unknown λα_l once c is known, and linear in (λα_l, −2λα_l·c) when it is not.

A group is the counted or the masked decisions of one layer, z̄ its mean log Z. Three penalties are fitted by least squares, each
with one weight a per group:

    squares         Σ a·mean(log Z − c)²
    constant        Σ a·mean(log Z)
    squared means   Σ a·(z̄ − c)², or with z̄ over all groups
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from zloss.errors import CoefficientError, MissingInputError
from zloss.results.router import DROWNED, EXPLAINED, MeasuredScale, ScaleVerdict
from zloss.router.decisions import LayerTensors, read_router_logits
from zloss.tensors import at_least_fp32

FAR = 30.0
"""A fitted |c| beyond this means that a slope was fitted as a square: log Z_R and log E are smaller."""
CURVED = 20.0
"""One batch determines scale and c together if squares add this multiple of rounding to slopes."""

Gradient = list[Tensor]
"""One fp64 tensor per parameter."""

_Result = TypeVar("_Result")


def measure_router_scale(
    on: Callable[[], Tensor],
    off: Callable[[], Tensor],
    router_logits: Callable[[], Sequence[Tensor]],
    parameters: Sequence[Tensor],
    *,
    coef: float,
    coef_off: float = 0.0,
    mask: LayerTensors | None = None,
    target: float | Literal["fit"] = "fit",
    seed: int = 0,
) -> MeasuredScale:
    """λα and s_rel that a loss applies, from its parameter gradients with and without its router Z-loss.

    `on` and `off` run the model and return the scalar to differentiate, with coefficient `coef` and `coef_off`;
    `router_logits` runs it and returns the [T, E] logits of every layer with their graph; `parameters` are the router
    weights of all layers. Each call runs under the same seed, so dropout cancels. With a `mask` (True = counted) the
    masked decisions get separate weights. `target="fit"` recovers c as well; a known c is more accurate if log Z hardly
    varies.

    If the batch does not distinguish the mean of squares from the square of the mean or from a mean without a square, the
    three functions run again with the router weights scaled up and down. The weights are restored afterwards.
    """
    if coef == coef_off:
        raise CoefficientError(f"`coef` and `coef_off` are expected to differ, but both are {coef!r}.")
    if not parameters:
        raise MissingInputError("`parameters` is empty: pass the router weights of all layers.")
    take_draw = partial(_draw, on, off, router_logits, parameters, mask, seed)
    first = take_draw()
    if norm(first.measured) == 0:
        return _nothing_applied(coef - coef_off, first)
    known = None if target == "fit" else float(target)
    draws = [first]
    fits, limit = _fits(draws, known)
    flat = known is None and fit_constant(draws).left < CURVED * min(first.noise, limit)
    if len(fits) > 1 or (fits and flat):
        for factor in _factors(first.logit_std):
            with _scaled(parameters, factor):
                draws.append(take_draw(first.centers))
        # A draw that equals the first did not see the scaled weights.
        draws = [first, *(draw for draw in draws[1:] if _differs(draw, first))]
        fits, limit = _fits(draws, known)
    verdict: ScaleVerdict
    if len(fits) == 1 and limit <= DROWNED:
        ((verdict, fitted),) = fits.items()
    else:
        verdict, fitted = "undetermined" if fits else "unexplained", fit_squares(draws, known)
    return _measured_scale(coef - coef_off, first, fitted, verdict, limit)


def _differs(draw: Draw, first: Draw) -> bool:
    size = norm(draw.measured)
    return math.isfinite(size) and size > 0 and norm(minus(draw.measured, first.measured)) > 0


def _fits(draws: Sequence[Draw], target: float | None) -> tuple[dict[ScaleVerdict, Fitted], float]:
    """The penalties that explain the draws up to rounding, and the residual that rounding may leave.

    The dtype bounds that residual. The main gradients cancel where they are rounded alike, so it may be far smaller; the
    residual of the best penalty estimates it.
    """
    constant = fit_constant(draws)
    found: dict[ScaleVerdict, Fitted] = {
        "explained": fit_squares(draws, target),
        "not_squared": constant,
        "squared_mean": fit_squared_means(draws, target),
    }
    best = min(fitted.left for fitted in found.values())
    limit = max(EXPLAINED, min(max(draw.noise for draw in draws), 3 * best))
    fits: dict[ScaleVerdict, Fitted] = {}
    for verdict, fitted in found.items():
        # λ·log Z fits squares with c → ±∞.
        slope = verdict != "not_squared" and constant.left <= limit and (fitted.c is None or abs(fitted.c) > FAR)
        if fitted.left <= limit and not slope:
            fits[verdict] = fitted
    return fits, limit


def _factors(logit_std: float) -> tuple[float, float]:
    """Powers of two that bring the logits near a standard deviation of 2 and of 4, without rounding; never 1."""
    exponent = round(math.log2(2 / logit_std)) if math.isfinite(logit_std) and logit_std > 0 else 1
    exponent = min(max(exponent, -2), 16)
    return (2.0**exponent, 2.0 ** (exponent + 1)) if exponent not in (0, -1) else (0.5, 2.0)


@contextmanager
def _scaled(parameters: Sequence[Tensor], factor: float) -> Iterator[None]:
    """Scale the parameters by `factor` inside the block; through `.data`, so the caller's graphs stay valid."""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data.copy_(value * factor)
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data.copy_(value)


class _Group(NamedTuple):
    """The counted or the masked decisions of one layer."""

    layer: int
    size: int
    counted: bool


@dataclass(frozen=True)
class Draw:
    """The gradient measured at one setting of the router weights, and the gradients that may explain it."""

    measured: Gradient
    slopes: Sequence[Gradient]
    """∇mean(log Z) of every group."""
    bends: Sequence[Gradient]
    """∇mean(log Z − m)² of every group, m as in `centers`: nearly orthogonal to the slope if m is near z̄."""
    centers: Sequence[float]
    """m of every group, the same in all draws."""
    means: Sequence[float]
    """z̄ of every group."""
    groups: Sequence[_Group]
    """The counted groups of all layers, then the masked ones."""
    layers: int
    logit_std: float
    """Standard deviation of all router logits."""
    noise: float
    """Share of the norm of `measured` that rounding can account for."""

    def squares(self, c: float) -> list[Gradient]:
        """∇mean(log Z − c)² of every group."""
        parts = zip(self.bends, self.slopes, self.centers, strict=True)
        return [_plus(bend, 2 * (m - c), slope) for bend, slope, m in parts]

    def squared_means(self, c: float, *, over_all: bool) -> list[Gradient]:
        """∇(z̄ − c)² of every group, with the z̄ of the group or of all groups."""
        means = self.means
        if over_all:
            sizes = [group.size for group in self.groups]
            means = [sum(z * n for z, n in zip(means, sizes, strict=True)) / sum(sizes)] * len(means)
        return [[2 * (mean - c) * x for x in slope] for mean, slope in zip(means, self.slopes, strict=True)]


def _draw(
    on: Callable[[], Tensor],
    off: Callable[[], Tensor],
    router_logits: Callable[[], Sequence[Tensor]],
    parameters: Sequence[Tensor],
    mask: LayerTensors | None,
    seed: int,
    centers: Sequence[float] | None = None,
) -> Draw:
    """The measured gradient and those that may explain it, at the current values of the parameters."""
    with_z, without = (gradient(_seeded(run, seed), parameters) for run in (on, off))
    measured = minus(with_z, without)
    logits = [layer if layer.ndim == 2 else layer.flatten(0, -2) for layer in _seeded(router_logits, seed)]
    decisions = read_router_logits(logits, mask, two_stacks=True)
    masks = decisions.valid_N.split_with_sizes(list(decisions.tokens))
    keeps = [(layer, keep, True) for layer, keep in enumerate(masks) if bool(keep.any())]
    keeps += [(layer, ~keep, False) for layer, keep in enumerate(masks) if not bool(keep.all())]
    log_z = [torch.logsumexp(at_least_fp32(layer), dim=1) for layer in logits]
    parts = [log_z[layer][keep] for layer, keep, _ in keeps]
    means = [float(part.detach().double().mean()) for part in parts]
    around = means if centers is None else centers
    size = norm(measured)
    eps = max(*map(_logit_eps, logits), *(torch.finfo(p.dtype).eps for p in parameters))
    return Draw(
        measured=measured,
        slopes=[gradient(part.mean(), parameters, retain=True) for part in parts],
        bends=[
            gradient(((part - m) ** 2).mean(), parameters, retain=True) for part, m in zip(parts, around, strict=True)
        ],
        centers=around,
        means=means,
        groups=[_Group(layer, part.numel(), counted) for (layer, _, counted), part in zip(keeps, parts, strict=True)],
        layers=decisions.layers,
        logit_std=float(torch.cat([layer.detach().double().flatten() for layer in logits]).std()),
        # Both gradients are rounded before the subtraction, and so are the gradients that explain the difference.
        noise=eps * (norm(with_z) + norm(without) + size) / size if size else 0.0,
    )


def _logit_eps(logits: Tensor) -> float:
    """eps of the dtype in which the logits were computed: routers return 16-bit products as fp32."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(logits.detach().to(dtype).to(logits.dtype), logits.detach()):
            return torch.finfo(dtype).eps
    return torch.finfo(logits.dtype).eps


def _seeded(run: Callable[[], _Result], seed: int) -> _Result:
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        return run()


def _nothing_applied(coef: float, draw: Draw) -> MeasuredScale:
    zeros = (0.0,) * draw.layers
    masked = any(not group.counted for group in draw.groups)
    return MeasuredScale(coef, None, zeros, 0.0, 0.0, zeros, 0.0 if masked else None, 0.0, "nothing_applied")


def _measured_scale(coef: float, draw: Draw, fitted: Fitted, verdict: ScaleVerdict, limit: float) -> MeasuredScale:
    absolute, sizes = [0.0] * draw.layers, [0] * draw.layers
    masked = []
    for group, weight in zip(draw.groups, fitted.weights, strict=True):
        per_decision = weight / group.size
        if group.counted:
            absolute[group.layer], sizes[group.layer] = per_decision, group.size
        else:
            masked.append((group.size, per_decision))
    total = sum(sizes)
    mean = sum(value * size for value, size in zip(absolute, sizes, strict=True)) / total if total else 0.0
    ratio = None
    if masked and mean:
        ratio = sum(value * size for size, value in masked) / sum(size for size, _ in masked) / mean
    return MeasuredScale(
        coef=coef,
        target=None if verdict in ("not_squared", "undetermined") else fitted.c,
        absolute_per_layer=tuple(absolute),
        relative=total * mean / coef,
        relative_all=sum(group.size for group in draw.groups) * mean / coef,
        relative_per_layer=tuple(total * value / coef for value in absolute),
        padding_ratio=ratio,
        residual=fitted.left,
        verdict=verdict,
        limit=limit,
    )


@dataclass(frozen=True)
class Fitted:
    """One penalty fitted to all draws."""

    c: float | None
    weights: Sequence[float]
    left: float
    """Unexplained share of the measured norm."""


def fit_constant(draws: Sequence[Draw]) -> Fitted:
    """Σ a·mean(log Z): the source is the same at every log Z."""
    return Fitted(None, *_explain(draws, [draw.slopes for draw in draws]))


def fit_squares(draws: Sequence[Draw], target: float | None) -> Fitted:
    """Σ a·mean(log Z − c)²; c is fitted if `target` is None."""
    c = target
    if c is None:
        weights, left = _explain(draws, [[*draw.bends, *draw.slopes] for draw in draws])
        groups = len(draws[0].slopes)
        # b = 2a(m − c), with one c for all groups, which count by what they apply.
        c = _common_target(weights[:groups], weights[groups:], draws[0].centers)
        if c is None:
            return Fitted(None, weights[groups:], left)
    return Fitted(c, *_explain(draws, [draw.squares(c) for draw in draws]))


def fit_squared_means(draws: Sequence[Draw], target: float | None) -> Fitted:
    """Σ a·(z̄ − c)² with the mean of each group or of all of them, whichever explains more."""
    return min((_fit_squared_means(draws, target, over_all) for over_all in (False, True)), key=lambda fit: fit.left)


def _fit_squared_means(draws: Sequence[Draw], target: float | None, over_all: bool) -> Fitted:
    c = target
    if c is None:
        columns = [[*draw.squared_means(0.0, over_all=over_all), *draw.slopes] for draw in draws]
        weights, left = _explain(draws, columns)
        groups = len(draws[0].slopes)
        c = _common_target(weights[:groups], weights[groups:], [0.0] * groups)
        if c is None:
            return Fitted(None, weights[groups:], left)
    return Fitted(c, *_explain(draws, [draw.squared_means(c, over_all=over_all) for draw in draws]))


def _common_target(squares: Sequence[float], slopes: Sequence[float], centers: Sequence[float]) -> float | None:
    """c of a·(log Z − m)² + b·log Z in every group; None if there is no square."""
    total = sum(squares)
    if total == 0:
        return None
    return sum(a * m - b / 2 for a, b, m in zip(squares, slopes, centers, strict=True)) / total


def _explain(draws: Sequence[Draw], columns: Sequence[Sequence[Gradient]]) -> tuple[list[float], float]:
    """Least squares over all draws, each with the same influence."""
    norms = [norm(draw.measured) for draw in draws]
    measured = [x / n for draw, n in zip(draws, norms, strict=True) for x in draw.measured]
    joined = [
        [x / n for column, n in zip(column_of_draws, norms, strict=True) for x in column]
        for column_of_draws in zip(*columns, strict=True)
    ]
    if not all(math.isfinite(norm(column)) for column in (measured, *joined)):
        return [math.nan] * len(joined), math.inf
    return least_squares(measured, joined)


def _plus(a: Gradient, factor: float, b: Gradient) -> Gradient:
    return [x + factor * y for x, y in zip(a, b, strict=True)]


def gradient(value: Tensor, parameters: Sequence[Tensor], *, retain: bool = False) -> Gradient:
    """∇value, with zeros for parameters it does not reach."""
    found = torch.autograd.grad(value, list(parameters), retain_graph=retain, allow_unused=True)
    return [
        torch.zeros_like(p, dtype=torch.float64) if g is None else g.detach().double()
        for g, p in zip(found, parameters, strict=True)
    ]


def minus(a: Gradient, b: Gradient) -> Gradient:
    return [x - y for x, y in zip(a, b, strict=True)]


def dot(a: Gradient, b: Gradient) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))


def norm(a: Gradient) -> float:
    return float(dot(a, a) ** 0.5)


def least_squares(measured: Gradient, columns: Sequence[Gradient]) -> tuple[list[float], float]:
    """Weights that explain `measured` by the columns, and the unexplained share of its norm."""
    scale = [norm(column) or 1.0 for column in columns]
    unit = list(zip(columns, scale, strict=True))
    gram = torch.tensor([[dot(a, b) / (s * t) for b, t in unit] for a, s in unit], dtype=torch.float64)
    right = torch.tensor([[dot(a, measured) / s] for a, s in unit], dtype=torch.float64)
    # Columns of unit norm and the minimum-norm solution: a layer whose gradient is 0 gets weight 0.
    solved = torch.linalg.lstsq(gram, right, driver="gelsd").solution.squeeze(1)
    weights = [float(x) / s for x, s in zip(solved, scale, strict=True)]
    rest = measured
    for weight, column in zip(weights, columns, strict=True):
        rest = [x - weight * y for x, y in zip(rest, column, strict=True)]
    return weights, norm(rest) / norm(measured)
