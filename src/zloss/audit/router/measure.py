"""What a router Z-loss really applies, recovered from parameter gradients.

A logged scalar cannot be trusted: side-channel scalers inject gradients the scalar never shows, and a trainer may log a
layer mean and train a layer sum. The gradient with the loss on minus the gradient with it off is

    ∇(on) − ∇(off) = Σ_l Σ_{t in l} λα_l ∇(log Z_{t,l} − c)²

which is linear in the unknown λα_l once c is known, and linear in (λα_l, −2λα_l·c) when it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from zloss.audit.router.fit import Draw, Fitted, fit_constant, fit_squared_means, fit_squares, gradient, minus, norm
from zloss.errors import CoefficientError, InputError, MissingInputError
from zloss.models.routers import find_routers
from zloss.results.router import DROWNED, EXPLAINED, MeasuredScale, ScaleVerdict
from zloss.source.precision import at_least_fp32
from zloss.source.router.decisions import LayerTensors, RouterInput, read_router_logits

FAR = 30.0
"""A fitted |c| beyond this is a slope that is read as a square: log Z_R and log E are smaller."""

CURVED = 20.0
"""What squares add to slopes, as a multiple of rounding, from which one batch determines scale and c together."""


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
    masked decisions are weighed apart. `target="fit"` recovers c as well; a known c is more accurate where log Z
    hardly varies.

    Where the batch cannot tell the mean of squares from the square of the mean or from a mean without a square, the three
    functions run again with the router weights scaled up and down. The weights are restored afterwards.
    """
    if coef == coef_off:
        raise CoefficientError(f"`coef` and `coef_off` are expected to differ, but both are {coef!r}.")
    if not parameters:
        raise MissingInputError("`parameters` is empty: pass the router weights of all layers.")
    loss = _RouterLossUnderTest(on, off, router_logits, parameters, mask, seed)
    first, decisions = loss.draw()
    if norm(first.measured) == 0:
        return _nothing(coef - coef_off, decisions)
    known = None if target == "fit" else float(target)
    draws = [first]
    fits, limit = _fits(draws, known)
    flat = known is None and fit_constant(draws).left < CURVED * min(first.noise, limit)
    if len(fits) > 1 or (fits and flat):
        for factor in _factors(decisions.logits):
            with _scaled(parameters, factor):
                draws.append(loss.draw(first.centers)[0])
        # A draw that equals the first did not see the scaled weights.
        draws = [first, *(draw for draw in draws[1:] if _differs(draw, first))]
        fits, limit = _fits(draws, known)
    verdict: ScaleVerdict
    if len(fits) == 1 and limit <= DROWNED:
        ((verdict, fitted),) = fits.items()
    else:
        verdict, fitted = "undetermined" if fits else "unexplained", fit_squares(draws, known)
    return _summary(coef - coef_off, decisions, fitted, verdict, limit)


def _differs(draw: Draw, first: Draw) -> bool:
    size = norm(draw.measured)
    return math.isfinite(size) and size > 0 and norm(minus(draw.measured, first.measured)) > 0


def _fits(draws: Sequence[Draw], target: float | None) -> tuple[dict[ScaleVerdict, Fitted], float]:
    """The penalties that explain the draws up to rounding, and the residual that rounding may leave.

    The dtype bounds that residual. Main gradients that are rounded alike cancel, so it may be far less: what the best of the
    penalties leaves is the rounding that there is.
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


def _factors(logits: Sequence[Tensor]) -> tuple[float, float]:
    """Powers of two that bring the logits near a standard deviation of 2 and of 4, without rounding; never 1."""
    spread = float(torch.cat([layer.detach().double().flatten() for layer in logits]).std())
    exponent = round(math.log2(2 / spread)) if math.isfinite(spread) and spread > 0 else 1
    exponent = min(max(exponent, -2), 16)
    return (2.0**exponent, 2.0 ** (exponent + 1)) if exponent not in (0, -1) else (0.5, 2.0)


@contextmanager
def _scaled(parameters: Sequence[Tensor], factor: float) -> Iterator[None]:
    """The parameters times `factor` inside the block; through `.data`, so that graphs of the caller stay valid."""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data.copy_(value * factor)
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data.copy_(value)


@dataclass(frozen=True)
class _Decisions:
    """The routing decisions of a draw, in groups: the counted ones of every layer, then the masked ones."""

    read: RouterInput
    logits: Sequence[Tensor]
    groups: Sequence[tuple[int, Tensor]]
    """(layer, which of its decisions)."""
    counted_groups: int


@dataclass(frozen=True)
class _RouterLossUnderTest:
    on: Callable[[], Tensor]
    off: Callable[[], Tensor]
    router_logits: Callable[[], Sequence[Tensor]]
    parameters: Sequence[Tensor]
    mask: LayerTensors | None
    seed: int

    def draw(self, centers: Sequence[float] | None = None) -> tuple[Draw, _Decisions]:
        """The measured gradient and those that may explain it, at the parameters as they are."""
        with_z, without = (gradient(_seeded(run, self.seed), self.parameters) for run in (self.on, self.off))
        measured = minus(with_z, without)
        decisions = self._decisions()
        log_z = [torch.logsumexp(at_least_fp32(layer), dim=1) for layer in decisions.logits]
        parts = [log_z[index][keep] for index, keep in decisions.groups]
        means = [float(part.detach().double().mean()) for part in parts]
        around = means if centers is None else centers
        size = norm(measured)
        eps = max(*map(_logit_eps, decisions.logits), *(torch.finfo(p.dtype).eps for p in self.parameters))
        draw = Draw(
            measured=measured,
            slopes=[gradient(part.mean(), self.parameters, retain=True) for part in parts],
            bends=[
                gradient(((part - m) ** 2).mean(), self.parameters, retain=True)
                for part, m in zip(parts, around, strict=True)
            ],
            centers=around,
            means=means,
            sizes=[part.numel() for part in parts],
            # Both gradients are rounded before their difference is taken, and so is what explains it.
            noise=eps * (norm(with_z) + norm(without) + size) / size if size else 0.0,
        )
        return draw, decisions

    def _decisions(self) -> _Decisions:
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(self.seed)
            layers = [layer if layer.ndim == 2 else layer.flatten(0, -2) for layer in self.router_logits()]
        read = read_router_logits(layers, self.mask, two_stacks=True)
        masks = read.valid_N.split_with_sizes(list(read.tokens))
        counted = [(index, keep) for index, keep in enumerate(masks) if bool(keep.any())]
        masked = [(index, ~keep) for index, keep in enumerate(masks) if not bool(keep.all())]
        return _Decisions(read, layers, [*counted, *masked], len(counted))


def measure_model_router_scale(
    model: nn.Module,
    batch: dict[str, Tensor],
    *,
    coef: float = 1.0,
    attribute: str = "router_z_loss_coef",
    mask: LayerTensors | None = None,
    target: float | Literal["fit"] = "fit",
    seed: int = 0,
) -> MeasuredScale:
    """What a Hugging Face model's own router Z-loss applies: its coefficient is set to `coef` and to 0 in turn.

    `batch` holds the model's inputs with labels. The coefficient is the model's attribute `attribute`, restored after.
    """
    routers = find_routers(model)
    if not hasattr(model, attribute):
        raise InputError(
            f"{type(model).__name__} has no attribute {attribute!r}: its loss has no router Z-loss of its own."
        )
    parameters = [
        p for router in routers.modules for p in router.module.parameters() if p.requires_grad and p.ndim == 2
    ]

    def loss(value: float) -> Tensor:
        before = getattr(model, attribute)
        setattr(model, attribute, value)
        try:
            found = model(**batch, output_router_logits=True).loss
        finally:
            setattr(model, attribute, before)
        if not isinstance(found, Tensor):
            raise MissingInputError("the model returned no loss: `batch` needs labels.")
        return found

    def logits() -> list[Tensor]:
        with routers.capture() as collected:
            model(**batch)
        return collected

    return measure_router_scale(
        lambda: loss(coef), lambda: loss(0.0), logits, parameters, coef=coef, mask=mask, target=target, seed=seed
    )


def _logit_eps(logits: Tensor) -> float:
    """eps of the dtype in which the logits were computed: routers return 16-bit products as fp32."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(logits.detach().to(dtype).to(logits.dtype), logits.detach()):
            return torch.finfo(dtype).eps
    return torch.finfo(logits.dtype).eps


def _seeded(run: Callable[[], Tensor], seed: int) -> Tensor:
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        return run()


def _nothing(coef: float, decisions: _Decisions) -> MeasuredScale:
    zeros = (0.0,) * decisions.read.layers
    masked = len(decisions.groups) > decisions.counted_groups
    return MeasuredScale(coef, None, zeros, 0.0, 0.0, zeros, 0.0 if masked else None, 0.0, "nothing_applied")


def _summary(coef: float, decisions: _Decisions, fitted: Fitted, verdict: ScaleVerdict, limit: float) -> MeasuredScale:
    read, sizes = decisions.read, [0] * decisions.read.layers
    per_decision = [
        (index, int(keep.sum()), weight / int(keep.sum()))
        for (index, keep), weight in zip(decisions.groups, fitted.weights, strict=True)
    ]
    counted, masked = per_decision[: decisions.counted_groups], per_decision[decisions.counted_groups :]
    absolute = [0.0] * read.layers
    for index, size, value in counted:
        absolute[index], sizes[index] = value, size
    total = sum(sizes)
    mean = sum(value * size for value, size in zip(absolute, sizes, strict=True)) / total if total else 0.0
    ratio = None
    if masked and mean:
        ratio = sum(value * size for _, size, value in masked) / sum(size for _, size, _ in masked) / mean
    return MeasuredScale(
        coef=coef,
        target=None if verdict in ("not_squared", "undetermined") else fitted.c,
        absolute_per_layer=tuple(absolute),
        relative=total * mean / coef,
        relative_all=sum(read.tokens) * mean / coef,
        relative_per_layer=tuple(total * value / coef for value in absolute),
        padding_ratio=ratio,
        residual=fitted.left,
        verdict=verdict,
        limit=limit,
    )
