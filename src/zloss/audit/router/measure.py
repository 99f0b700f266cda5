"""What a router Z-loss really applies, recovered from parameter gradients.

A logged scalar cannot be trusted: side-channel scalers inject gradients the scalar never shows, and a trainer may log a
layer mean and train a layer sum. The gradient with the loss on minus the gradient with it off is

    ∇(on) − ∇(off) = Σ_l Σ_{t in l} λα_l ∇(log Z_{t,l} − c)²

which is linear in the unknown λα_l once c is known, and linear in (λα_l, −2λα_l·c) when it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from zloss.audit.router.fit import Gradient, fit_target, gradient, least_squares, minus, norm
from zloss.errors import CoefficientError, InputError, MissingInputError
from zloss.models.routers import find_routers
from zloss.results.router import MeasuredScale, ScaleVerdict
from zloss.source.router.decisions import LayerTensors, RouterInput, read_router_logits
from zloss.tensors import at_least_fp32

EXPLAINED = 1e-3
"""Residual up to which a weighted squared log-normalizer is the answer; fp32 gradients leave 1e-6 to 1e-4."""

HARDLY = 1e-3
"""Standard deviation of log Z below which a square and its slope look alike in fp32."""


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
    """
    if coef == coef_off:
        raise CoefficientError(f"`coef` and `coef_off` are expected to differ, but both are {coef!r}.")
    if not parameters:
        raise MissingInputError("`parameters` is empty: pass the router weights of all layers.")
    measured = minus(*(gradient(_seeded(run, seed), parameters) for run in (on, off)))
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        layers = [layer if layer.ndim == 2 else layer.flatten(0, -2) for layer in router_logits()]
    read = read_router_logits(layers, mask, two_stacks=True)
    masks = read.valid_N.split_with_sizes(list(read.tokens))
    groups = [(index, keep) for index, keep in enumerate(masks) if bool(keep.any())]
    counted_groups = len(groups)
    groups += [(index, ~keep) for index, keep in enumerate(masks) if not bool(keep.all())]
    log_z = [torch.logsumexp(at_least_fp32(layer), dim=1) for layer in layers]
    parts = [log_z[index][keep] for index, keep in groups]
    if norm(measured) == 0:
        return _nothing(coef - coef_off, read, masked=len(groups) > counted_groups)
    summary = partial(_summary, coef - coef_off, read, groups, parts, counted_groups)
    plain = [gradient(part.mean(), parameters, retain=True) for part in parts]
    weights, left_plain = least_squares(measured, plain)
    c = _target(measured, parts, parameters, left_plain) if target == "fit" else float(target)
    if c is None:
        return summary(None, weights, left_plain, "not_squared")
    columns = [gradient(((part - c) ** 2).mean(), parameters, retain=True) for part in parts]
    squares, left = least_squares(measured, columns)
    if target != "fit" and left > EXPLAINED >= left_plain:
        return summary(None, weights, left_plain, "not_squared")
    return summary(c, squares, left, "explained" if left <= EXPLAINED else "unexplained")


def _target(
    measured: Gradient, parts: Sequence[Tensor], parameters: Sequence[Tensor], left_plain: float
) -> float | None:
    """c, or None where ∇mean(log Z) alone explains the gradient as well as squares do: then there is no square.

    λ·log Z fits a square with c → ∓∞, so it is decided by how much the squares add.
    """
    c, left_both = fit_target(measured, parts, parameters)
    if left_plain > max(10 * left_both, 1e-9) or left_plain > EXPLAINED:
        return c
    spread = max(float(part.detach().double().std()) for part in parts if part.numel() > 1)
    if spread < HARDLY:
        raise InputError(
            f"log Z hardly varies over these decisions (standard deviation {spread:.1g}), so a square cannot be told from "
            "its slope: pass `target`."
        )
    return None


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


def _seeded(run: Callable[[], Tensor], seed: int) -> Tensor:
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        return run()


def _nothing(coef: float, read: RouterInput, *, masked: bool) -> MeasuredScale:
    zeros = (0.0,) * read.layers
    return MeasuredScale(coef, None, zeros, 0.0, 0.0, zeros, 0.0 if masked else None, 0.0, "nothing_applied")


def _summary(
    coef: float,
    read: RouterInput,
    groups: Sequence[tuple[int, Tensor]],
    parts: Sequence[Tensor],
    counted_groups: int,
    c: float | None,
    weights: Sequence[float],
    residual: float,
    verdict: ScaleVerdict,
) -> MeasuredScale:
    per_decision = [weight / part.numel() for weight, part in zip(weights, parts, strict=True)]
    counted = list(zip(groups, per_decision, strict=True))[:counted_groups]
    masked = list(zip(groups, per_decision, strict=True))[counted_groups:]
    absolute = [0.0] * read.layers
    sizes = [0] * read.layers
    for (index, keep), value in counted:
        absolute[index], sizes[index] = value, int(keep.sum())
    total = sum(sizes)
    mean = sum(value * size for value, size in zip(absolute, sizes, strict=True)) / total if total else 0.0
    ratio = None
    if masked and mean:
        weight = sum(int(keep.sum()) for (_, keep), _ in masked)
        ratio = sum(value * int(keep.sum()) for (_, keep), value in masked) / weight / mean
    return MeasuredScale(
        coef=coef,
        target=c,
        absolute_per_layer=tuple(absolute),
        relative=total * mean / coef,
        relative_all=sum(read.tokens) * mean / coef,
        relative_per_layer=tuple(total * value / coef for value in absolute),
        padding_ratio=ratio,
        residual=residual,
        verdict=verdict,
    )
