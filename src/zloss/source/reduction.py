"""Reductions: the only place where a loss gets its denominator, shared by cross-entropy and auxiliary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from zloss.errors import InputError, ReductionError
from zloss.source.number_kind import is_number

Reduction = Literal["mean", "sum", "none"]
DenominatorName = Literal["valid_tokens", "token_weight", "normalizer", "one"]


@dataclass(frozen=True)
class TokenWeights:
    """w_t of every token (0 at ignored ones) with the denominator already inside, and what that denominator was.

    Σ_t per_token_t · ℓ_t is the reduced loss for "mean" and "sum"; per_token_t · ℓ_t is the loss for "none".
    """

    per_token: Tensor
    reduction: Reduction
    denominator: Tensor
    denominator_name: DenominatorName


def check_reduction(reduction: str) -> None:
    if not isinstance(reduction, str) or reduction not in get_args(Reduction):
        raise ReductionError(reduction)


def reduction_weights(
    valid: Tensor,
    reduction: Reduction,
    *,
    dtype: torch.dtype,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> TokenWeights:
    """w_t / N: N = Σ w_t over valid tokens for "mean", or the explicit global `normalizer`; 1 for "sum" and "none".

    N = 0 (an all-ignored batch) gives weight 0 everywhere: loss 0 and zero gradients, never NaN.
    """
    check_reduction(reduction)
    weight = valid.to(dtype)
    if token_weight is not None:
        # `where`, not a product: an ignored token's weight may be anything, even NaN.
        weight = torch.where(valid, token_weight.detach().to(dtype), weight.new_zeros(()))
    one = weight.new_ones(())
    if reduction != "mean":
        if normalizer is not None:
            raise InputError(f"`normalizer` replaces the denominator of reduction='mean', but reduction={reduction!r}.")
        return TokenWeights(weight, reduction, one, "one")
    name: DenominatorName
    if normalizer is not None:
        denominator, name = as_denominator(normalizer, weight), "normalizer"
    else:
        denominator, name = weight.sum(), "valid_tokens" if token_weight is None else "token_weight"
    per_token = torch.where(
        denominator == 0, weight.new_zeros(()), weight / torch.where(denominator == 0, one, denominator)
    )
    return TokenWeights(per_token, reduction, denominator, name)


def as_denominator(normalizer: float | Tensor, like: Tensor) -> Tensor:
    """An explicit `normalizer` as a 0-d tensor of the dtype and device of `like`; its value is checked on the CPU only."""
    if isinstance(normalizer, Tensor):
        if normalizer.numel() != 1:
            raise InputError(
                f"`normalizer` is expected to be a number or a 0-d tensor, but got shape {list(normalizer.shape)}."
            )
        denominator = normalizer.detach().to(like).reshape(())
        if denominator.device.type == "cpu" and not bool(denominator >= 0):
            raise InputError(
                f"`normalizer` is expected to be a number ≥ 0 (the global token count), but got {normalizer.item()}."
            )
        return denominator
    if not is_number(normalizer) or not math.isfinite(normalizer) or normalizer < 0:
        raise InputError(
            f"`normalizer` is expected to be a finite number ≥ 0 (the global token count), but got {normalizer!r}."
        )
    return like.new_tensor(float(normalizer))
