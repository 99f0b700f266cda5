"""What a router coefficient means under a convention, and the equal coefficient under another. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from zloss.errors import CoefficientError, InputError
from zloss.source.router.catalog import find_convention
from zloss.source.router.convention import RouterContext, RouterConvention, check_count, exact_coefficient


@dataclass(frozen=True)
class RouterScale:
    """The reduction weight of a convention. Scaling: per routing decision (t, l).

    Where layers differ (two stacks of unequal depth) the scalars are means over decisions and `uniform` is False.
    """

    convention: RouterConvention
    coef: float | None
    alpha: float
    """α."""
    absolute: float
    """λ_R·α, what multiplies (log Z − c)² of one decision."""
    relative: float
    """s_rel = N_tl·α, 1 for the token-layer mean."""
    relative_per_layer: tuple[float, ...]
    uniform: bool


def exact_scales(
    convention: RouterConvention, *, tokens: Sequence[int], top_k: int, context: RouterContext
) -> tuple[tuple[Fraction, ...], int]:
    """α_l of every layer as exact fractions, and N_tl = Σ_l N_l, from the counted tokens N_l of every layer."""
    total = sum(tokens)
    alphas = []
    for numerator, count in zip(convention.numerators(len(tokens), top_k, context), tokens, strict=True):
        if convention.token_count == "decisions":
            denominator = total
        elif convention.token_count == "valid_tokens" and context.valid_tokens is not None:
            denominator = context.valid_tokens
        else:
            denominator = count
        alphas.append(numerator / denominator)
    return tuple(alphas), total


def router_scale(
    convention: str | RouterConvention,
    *,
    layers: int,
    tokens: int,
    top_k: int,
    coef: float | None,
    model_layers: int | None = None,
    encoder_layers: int | None = None,
    valid_tokens: int | None = None,
    micro_batches: int = 1,
) -> RouterScale:
    """α, λα and s_rel for `layers` routers that each see `tokens` tokens (paper prop:router_effective_coefficient).

    >>> router_scale("active_route_mean", layers=4, tokens=1024, top_k=2, coef=1e-3).relative
    0.5
    """
    check_count("layers", layers)
    check_count("top_k", top_k)
    context = RouterContext(model_layers, encoder_layers, valid_tokens, micro_batches)
    _check_tokens(tokens, valid_tokens)
    found = find_convention(convention)
    alphas, total = exact_scales(found, tokens=(tokens,) * layers, top_k=top_k, context=context)
    mean = sum(alphas, Fraction(0)) / layers
    return RouterScale(
        convention=found,
        coef=coef,
        alpha=float(mean),
        # One rounding of the exact product: a matched coefficient then gives the same bits.
        absolute=float(exact_coefficient(coef) * mean),
        relative=float(total * mean),
        relative_per_layer=tuple(float(total * alpha) for alpha in alphas),
        uniform=len(set(alphas)) == 1,
    )


def match_coefficient(
    coef: float,
    source: str | RouterConvention,
    target: str | RouterConvention,
    *,
    layers: int,
    top_k: int,
    tokens: int = 1,
    model_layers: int | None = None,
    encoder_layers: int | None = None,
    valid_tokens: int | None = None,
    micro_batches: int = 1,
) -> float:
    """The coefficient under `target` that applies what `coef` applies under `source`: λ·s_source / s_target.

    The target c_R is no part of a scale. Most codebases have 0: pass it to `router_loss` with their coefficient, because
    `target=None` is log E.

    `tokens` matters only together with `valid_tokens`, which are among them. Where a convention weighs its stacks
    unequally, scales are means over decisions.

    >>> match_coefficient(1e-3, "megatron", "olmoe", layers=16, top_k=8)
    0.128
    """
    check_count("layers", layers)
    check_count("top_k", top_k)
    context = RouterContext(model_layers, encoder_layers, valid_tokens, micro_batches)
    _check_tokens(tokens, valid_tokens)
    exact, counts, sums = exact_coefficient(coef), (tokens,) * layers, []
    for convention in (source, target):
        alphas, _ = exact_scales(find_convention(convention), tokens=counts, top_k=top_k, context=context)
        sums.append(sum(alphas, Fraction(0)))
    if sums[1] == 0:
        if sums[0] * exact == 0:
            return 0.0
        raise CoefficientError(
            f"no coefficient under {find_convention(target).name!r} equals {coef!r} under "
            f"{find_convention(source).name!r}: that convention applies no router Z-loss at all."
        )
    return float(exact * sums[0] / sums[1])


def _check_tokens(tokens: int, valid_tokens: int | None) -> None:
    check_count("tokens", tokens)
    if valid_tokens is not None and valid_tokens > tokens:
        raise InputError(
            f"`valid_tokens` is expected to be at most `tokens`, {tokens}, but got {valid_tokens}: it counts the tokens of the "
            "batch that have a label, so pass all tokens of the batch as `tokens`."
        )
