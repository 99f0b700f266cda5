"""α_l, λα_l and s_rel of every layer under a convention, from counts that stay on their device.

Axes: L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

from zloss.errors import InputError
from zloss.ranks.global_normalizer import Gradients, as_groups, gradient_divisor
from zloss.source.router.convention import RouterContext, RouterConvention
from zloss.tensors import as_denominator


@dataclass(frozen=True)
class LayerWeights:
    """What a convention makes of the counts, fp64."""

    count_L: Tensor
    """D_l, the count that layer l is divided by."""
    numerators: Sequence[Fraction]
    """c_l, exact."""
    alpha_L: Tensor
    """α_l = c_l / D_l; 0 for a layer without counted decisions."""
    relative_L: Tensor
    """s_rel = c_l·(N_tl / D_l)."""

    def absolute(self, coef: Fraction) -> Tensor:
        """λα_l in one rounding of the exact λ·c_l, so that matched coefficients give the same bits; [L]."""
        return _over(_fp64([coef * c_l for c_l in self.numerators], self.alpha_L), self.count_L)


def layer_weights(convention: RouterConvention, counted_L: Tensor, top_k: int, context: RouterContext) -> LayerWeights:
    """The weights of layers with `counted_L` decisions each, fp64."""
    total = counted_L.sum()
    if convention.token_count == "decisions":
        count_L = total.expand_as(counted_L)
    elif convention.token_count == "valid_tokens" and context.valid_tokens is not None:
        count_L = torch.full_like(counted_L, context.valid_tokens)
    else:
        count_L = counted_L
    numerators = convention.numerators(len(counted_L), top_k, context)
    alpha_L = _over(_fp64(numerators, counted_L), count_L)
    # Numerator and denominator of c_l apart: N_tl / D_l is a whole number in the common case, so s_rel is exact.
    top_L = _fp64([Fraction(c_l.numerator) for c_l in numerators], counted_L)
    bottom_L = _fp64([Fraction(c_l.denominator) for c_l in numerators], counted_L)
    relative_L = top_L * _over(total.expand_as(count_L), count_L) / bottom_L
    return LayerWeights(count_L, numerators, alpha_L, relative_L)


def counted_decisions(
    own_L: Tensor,
    normalizer: float | Tensor | None,
    groups: dist.ProcessGroup | Iterable[dist.ProcessGroup] | None,
    gradients: Gradients | int,
) -> tuple[Tensor, int]:
    """(decisions of every layer that the loss is divided by, what the framework divides summed gradients by).

    `own_L`: the counted decisions of this rank, fp64.
    """
    if normalizer is not None:
        if groups is not None:
            raise InputError("`normalizer` and `groups` both say what is counted: pass one of them.")
        return as_denominator(normalizer, own_L).expand_as(own_L), 1
    if groups is None:
        return own_L, 1
    spread, whole_L = as_groups(groups), own_L.clone()
    for group in spread:
        dist.all_reduce(whole_L, dist.ReduceOp.SUM, group=group)
    return whole_L, gradient_divisor(gradients, spread)


def _fp64(values: Sequence[Fraction], like: Tensor) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64, device=like.device)


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 where nothing is counted."""
    return torch.where(denominator == 0, 0.0, numerator / torch.where(denominator == 0, 1.0, denominator))
