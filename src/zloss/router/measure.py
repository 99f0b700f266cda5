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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from zloss.errors import CoefficientError, DtypeError, InputError, MissingInputError
from zloss.results.router import DROWNED, EXPLAINED, MeasuredScale, ScaleVerdict
from zloss.router.loss import LayerTensors, read_router_logits
from zloss.tensors import at_least_fp32, check_tensor, is_number

FAR = 30.0
"""A fitted |c| beyond this means that a slope was fitted as a square: log Z_R and log E are smaller."""
CURVED = 20.0
"""One batch determines both the scale and c only if slopes alone leave at least this multiple of rounding unexplained."""

_Result = TypeVar("_Result")


def measure_router_scale(
    on: Callable[[], Tensor],
    off: Callable[[], Tensor],
    router_logits: Callable[[], Sequence[Tensor]],
    parameters: Iterable[Tensor],
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
    for name, run in (("on", on), ("off", off), ("router_logits", router_logits)):
        if not callable(run):
            raise DtypeError(
                f"`{name}` is expected to be a function that runs the model, but got {type(run).__name__}."
            )
    _check_numbers(coef, coef_off, target, seed)
    parameters = _router_weights(parameters)
    take_draw = partial(_draw, on, off, router_logits, parameters, mask, seed)
    first = take_draw()
    if not first.measured.isfinite().all():
        raise InputError("the gradient of `on` or of `off` is NaN or infinite: there is no scale to measure.")
    if not first.means.isfinite().all():
        raise InputError("log Z of `router_logits` is NaN or infinite: there is no scale to measure.")
    if not first.slopes_GP.any():
        raise InputError(
            "`router_logits` does not depend on `parameters`: pass the weights of the routers that it runs."
        )
    applied = coef - coef_off
    if first.measured.norm() == 0:
        return _measured_scale(applied, first, Fitted(None, torch.zeros(len(first.groups)), 0.0), "nothing_applied")
    known = None if target == "fit" else float(target)
    draws = [first]
    found, fits, limit = _fits(draws, known)
    flat = known is None and found["not_squared"].left < CURVED * min(first.noise, limit)
    if len(fits) > 1 or (fits and flat):
        for factor in _factors(first.logit_std):
            with _scaled(parameters, factor):
                draw = take_draw(first.centers)
            # A draw that equals the first did not see the scaled weights.
            if 0 < float(draw.measured.norm()) < math.inf and not torch.equal(draw.measured, first.measured):
                draws.append(draw)
        found, fits, limit = _fits(draws, known)
    if len(fits) == 1 and limit <= DROWNED:
        (verdict,) = fits
        return _measured_scale(applied, first, found[verdict], verdict, limit)
    return _measured_scale(applied, first, found["explained"], "undetermined" if fits else "unexplained", limit)


def _check_numbers(coef: Any, coef_off: Any, target: Any, seed: Any) -> None:
    for name, number in (("coef", coef), ("coef_off", coef_off)):
        if not is_number(number) or not math.isfinite(number):
            raise CoefficientError(f"`{name}` is expected to be a finite number, but got {number!r}.")
    if coef == coef_off:
        raise CoefficientError(f"`coef` and `coef_off` are expected to differ, but both are {coef!r}.")
    if target != "fit" and not (is_number(target) and math.isfinite(target)):
        raise CoefficientError(f"`target` is expected to be 'fit' or a finite number, but got {target!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise InputError(f"`seed` is expected to be an integer of 64 bits, but got {seed!r}.")


def _router_weights(given: Any) -> list[Tensor]:
    if isinstance(given, (str, Tensor)) or not isinstance(given, Iterable):
        raise DtypeError(f"`parameters` is expected to be a list of router weights, but got {type(given).__name__}.")
    parameters = list(given)
    if not parameters:
        raise MissingInputError("`parameters` is empty: pass the router weights of all layers.")
    for place, parameter in enumerate(parameters):
        check_tensor(f"parameters[{place}]", parameter)
        if not parameter.requires_grad:
            raise InputError(f"`parameters[{place}]` does not require a gradient: pass the router weights themselves.")
    return parameters


def _fits(draws: Sequence[Draw], target: float | None) -> tuple[dict[ScaleVerdict, Fitted], list[ScaleVerdict], float]:
    """(each penalty fitted, those that explain the draws up to rounding, the residual that rounding may leave).

    c is fitted if `target` is None. Of squared means, with the mean of each group or of all groups, whichever explains more.
    The dtype bounds that residual. The main gradients cancel where they are rounded alike, so it may be far smaller; the
    residual of the best penalty estimates it.
    """
    centers = draws[0].centers
    squared_means = (
        _fit(draws, target, columns, torch.zeros_like(centers))
        for columns in (Draw.squared_means, Draw.squared_overall_means)
    )
    constant = Fitted(None, *_explain(draws, [draw.slopes_GP for draw in draws]))
    found: dict[ScaleVerdict, Fitted] = {
        "explained": _fit(draws, target, Draw.squares, centers),
        "not_squared": constant,
        "squared_mean": min(squared_means, key=lambda fitted: fitted.left),
    }
    best = min(fitted.left for fitted in found.values())
    limit = max(EXPLAINED, min(max(draw.noise for draw in draws), 3 * best))
    fits: list[ScaleVerdict] = []
    for verdict, fitted in found.items():
        # λ·log Z fits squares with c → ±∞.
        slope = verdict != "not_squared" and constant.left <= limit and (fitted.c is None or abs(fitted.c) > FAR)
        if fitted.left <= limit and not slope:
            fits.append(verdict)
    return found, fits, limit


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
    """The gradient measured at one setting of the router weights, and the gradients that may explain it.

    A gradient is one fp64 vector over all parameters, [P]. G groups: the counted ones of all layers, then the masked ones.
    """

    measured: Tensor
    slopes_GP: Tensor
    """∇mean(log Z) of every group."""
    bends_GP: Tensor
    """∇mean(log Z − m)² of every group, m as in `centers`: nearly orthogonal to the slope if m is near z̄."""
    centers: Tensor
    """m of every group, the same in all draws."""
    means: Tensor
    """z̄ of every group."""
    groups: Sequence[_Group]
    layers: int
    logit_std: float
    """Standard deviation of all router logits."""
    noise: float
    """Share of the norm of `measured` that rounding can account for."""

    def squares(self, c_G: Tensor) -> Tensor:
        """∇mean(log Z − c)² of every group."""
        return self.bends_GP + 2 * (self.centers - c_G).unsqueeze(1) * self.slopes_GP

    def squared_means(self, c_G: Tensor) -> Tensor:
        """∇(z̄ − c)² of every group, with its own z̄."""
        return 2 * (self.means - c_G).unsqueeze(1) * self.slopes_GP

    def squared_overall_means(self, c_G: Tensor) -> Tensor:
        """∇(z̄ − c)² of every group, with the z̄ of all groups."""
        sizes = self.means.new_tensor([group.size for group in self.groups])
        overall = (self.means * sizes).sum() / sizes.sum()
        return 2 * (overall - c_G).unsqueeze(1) * self.slopes_GP


def _draw(
    on: Callable[[], Tensor],
    off: Callable[[], Tensor],
    router_logits: Callable[[], Sequence[Tensor]],
    parameters: Sequence[Tensor],
    mask: LayerTensors | None,
    seed: int,
    centers: Tensor | None = None,
) -> Draw:
    """The measured gradient and those that may explain it, at the current values of the parameters."""
    runs = (("on", on), ("off", off))
    with_z, without = (gradient(_loss(name, _seeded(run, seed)), parameters) for name, run in runs)
    measured = with_z - without
    decisions = read_router_logits(_seeded(router_logits, seed), mask, two_stacks=True)
    logits = [layer for given in decisions.tensors for layer in (given.unbind(0) if given.ndim == 3 else (given,))]
    if not decisions.valid_N.numel():
        raise InputError("`router_logits` has no tokens: nothing to measure.")
    for index, layer in enumerate(logits):
        if not layer.requires_grad:
            raise InputError(f"layer {index} of `router_logits` has no graph: return the logits without `.detach()`.")
    masks = decisions.valid_N.split_with_sizes(list(decisions.tokens))
    keeps = [(layer, keep, True) for layer, keep in enumerate(masks) if bool(keep.any())]
    keeps += [(layer, ~keep, False) for layer, keep in enumerate(masks) if not bool(keep.all())]
    log_z = [torch.logsumexp(at_least_fp32(layer), dim=1) for layer in logits]
    parts = [log_z[layer][keep] for layer, keep, _ in keeps]
    means = measured.new_tensor([float(part.detach().double().mean()) for part in parts])
    centers = means if centers is None else centers
    bends = [((part - m) ** 2).mean() for part, m in zip(parts, centers.tolist(), strict=True)]
    size = float(measured.norm())
    eps = max(*map(_logit_eps, logits), *(torch.finfo(p.dtype).eps for p in parameters))
    return Draw(
        measured=measured,
        slopes_GP=torch.stack([gradient(part.mean(), parameters, retain=True) for part in parts]),
        bends_GP=torch.stack([gradient(bend, parameters, retain=True) for bend in bends]),
        centers=centers,
        means=means,
        groups=[_Group(layer, part.numel(), counted) for (layer, _, counted), part in zip(keeps, parts, strict=True)],
        layers=decisions.layers,
        logit_std=float(torch.cat([layer.detach().double().flatten() for layer in logits]).std()),
        # Both gradients are rounded before the subtraction, and so are the gradients that explain the difference.
        noise=eps * (float(with_z.norm()) + float(without.norm()) + size) / size if size else 0.0,
    )


def _loss(name: str, returned: object) -> Tensor:
    """What `on` or `off` returned, if it can be differentiated."""
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        got = list(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
        raise DtypeError(f"`{name}` is expected to return a scalar tensor to differentiate, but returned {got}.")
    if not returned.requires_grad:
        raise InputError(f"`{name}` returned a loss without a graph: return it without `.detach()` or `.item()`.")
    return returned


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


def gradient(value: Tensor, parameters: Sequence[Tensor], *, retain: bool = False) -> Tensor:
    """∇value, with zeros for parameters it does not reach."""
    found = torch.autograd.grad(value, list(parameters), retain_graph=retain, allow_unused=True)
    parts = (torch.zeros_like(p) if g is None else g.detach() for g, p in zip(found, parameters, strict=True))
    return torch.cat([part.double().flatten().to(parameters[0].device) for part in parts])


class Fitted(NamedTuple):
    """One penalty fitted to all draws."""

    c: float | None
    weights_G: Tensor
    left: float
    """Unexplained share of the measured norm."""


def _fit(draws: Sequence[Draw], c: float | None, columns: Callable[[Draw, Tensor], Tensor], start_G: Tensor) -> Fitted:
    """The weights of `columns` at c. An unknown c comes from a fit of the columns at `start_G` together with the slopes."""
    if c is None:
        weights, left = _explain(draws, [torch.cat([columns(draw, start_G), draw.slopes_GP]) for draw in draws])
        squares_G, slopes_G = weights.chunk(2)
        if squares_G.sum() == 0:
            return Fitted(None, slopes_G, left)
        # a·(log Z − m)² + b·log Z with b = 2a(m − c), and one c for all groups, weighted by their coefficients.
        c = float((squares_G * start_G - slopes_G / 2).sum() / squares_G.sum())
    return Fitted(c, *_explain(draws, [columns(draw, torch.full_like(start_G, c)) for draw in draws]))


def _explain(draws: Sequence[Draw], columns: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Weights of the columns by least squares over all draws, each with the same influence; and the unexplained share."""
    norms = [draw.measured.norm() for draw in draws]
    measured = torch.cat([draw.measured / n for draw, n in zip(draws, norms, strict=True)])
    joined = torch.cat([each / n for each, n in zip(columns, norms, strict=True)], dim=1)
    if not (measured.isfinite().all() and joined.isfinite().all()):
        return joined.new_full((len(joined),), math.nan), math.inf
    scale = joined.norm(dim=1)
    scale = torch.where(scale == 0, 1.0, scale)
    gram = joined @ joined.T / (scale.unsqueeze(1) * scale)
    right = (joined @ measured / scale).unsqueeze(1)
    # Columns of unit norm and the minimum-norm solution: a layer whose gradient is 0 gets weight 0.
    solved = torch.linalg.lstsq(gram.cpu(), right.cpu(), driver="gelsd").solution.squeeze(1).to(scale.device)
    weights = solved / scale
    return weights, float((measured - weights @ joined).norm() / measured.norm())


def _measured_scale(
    coef: float, draw: Draw, fitted: Fitted, verdict: ScaleVerdict, limit: float = EXPLAINED
) -> MeasuredScale:
    weighted = list(zip(draw.groups, fitted.weights_G.tolist(), strict=True))
    absolute = [0.0] * draw.layers
    for group, weight in weighted:
        if group.counted:
            absolute[group.layer] = weight / group.size

    def size_and_mean(counted: bool) -> tuple[int, float]:
        """The decisions of a kind, and their mean weight."""
        size = sum(group.size for group in draw.groups if group.counted == counted)
        return size, sum(weight for group, weight in weighted if group.counted == counted) / max(size, 1)

    (counted, mean), (masked, masked_mean) = size_and_mean(True), size_and_mean(False)
    ratio = None
    if masked and (mean or verdict == "nothing_applied"):
        ratio = masked_mean / mean if mean else 0.0
    return MeasuredScale(
        coef=coef,
        target=None if verdict in ("not_squared", "undetermined") else fitted.c,
        absolute_per_layer=tuple(absolute),
        relative=counted * mean / coef,
        relative_all=(counted + masked) * mean / coef,
        relative_per_layer=tuple(counted * value / coef for value in absolute),
        padding_ratio=ratio,
        residual=fitted.left,
        verdict=verdict,
        limit=limit,
    )
