"""What a loss injects at the logits of a token: cross-entropy plus auxiliary, as coefficients of three vectors.

    δ_t = along_p_t · p_t  −  along_target_t · onehot(y_t)  −  along_uniform_t · 1/V

Axes: C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.errors import CoordinateError
from zloss.source.objective import Objective, Source
from zloss.source.statistics import TokenStats


@dataclass(frozen=True)
class Injection:
    """Values and source coefficients of every token. Scaling: per token, before any reduction."""

    cross_entropy: Tensor
    auxiliary: Tensor
    along_p: Tensor
    along_target: float
    along_uniform: Tensor | float
    auxiliary_along_p: Tensor
    auxiliary_along_uniform: Tensor | None

    @property
    def has_uniform(self) -> bool:
        return isinstance(self.along_uniform, Tensor) or self.along_uniform != 0


def inject(stats: TokenStats, objective: Objective, label_smoothing: float = 0.0) -> Injection:
    """Label-smoothed cross-entropy (along_target = 1 − ε, along_uniform = ε) plus the auxiliary of the objective."""
    epsilon = label_smoothing
    ce = -stats.target_log_prob
    if epsilon:
        if stats.mu is None:
            raise CoordinateError("`label_smoothing` needs the mean logit μ, which does not exist for these logits.")
        # log Z − (1 − ε)z_y − εμ, written in differences from m so that a common shift cancels first.
        ce = stats.log_s - (1 - epsilon) * (stats.target_logit - stats.row_max) - epsilon * (stats.mu - stats.row_max)
    if objective.active:
        source = objective.source(stats)
    else:
        zero = torch.zeros_like(ce)
        source = Source(value=zero, along_p=zero)
    uniform = epsilon if source.along_uniform is None else source.along_uniform + epsilon
    return Injection(
        cross_entropy=ce,
        auxiliary=source.value,
        along_p=1 + source.along_p,
        along_target=1 - epsilon,
        along_uniform=uniform,
        auxiliary_along_p=source.along_p,
        auxiliary_along_uniform=source.along_uniform,
    )


@dataclass(frozen=True)
class WeightedSource:
    """δ of a chunk in terms of E = exp(z − m) = S·p: along_exp·E − along_target·onehot(y) − along_uniform/V.

    Scaling: multiplied by the weight of every token (reduction and upstream gradient); 0 at ignored tokens.
    """

    along_exp_C: Tensor
    along_target_C: Tensor | None
    """None for the auxiliary alone, which has no target."""
    along_uniform_C: Tensor | None
    """None where nothing is injected along 1/V."""


def weighted_source(injection: Injection, sum_C: Tensor, valid_C: Tensor, weight_C: Tensor) -> WeightedSource:
    """The source of cross-entropy plus auxiliary; `sum_C` is S = Σ exp(z − m)."""
    return WeightedSource(
        along_exp_C=_counted(valid_C, weight_C * injection.along_p / sum_C),
        along_target_C=_counted(valid_C, weight_C * injection.along_target),
        along_uniform_C=_counted(valid_C, weight_C * injection.along_uniform) if injection.has_uniform else None,
    )


def weighted_auxiliary_source(injection: Injection, sum_C: Tensor, valid_C: Tensor, weight_C: Tensor) -> WeightedSource:
    """The source of the auxiliary alone."""
    uniform = injection.auxiliary_along_uniform
    return WeightedSource(
        along_exp_C=_counted(valid_C, weight_C * injection.auxiliary_along_p / sum_C),
        along_target_C=None,
        along_uniform_C=None if uniform is None else _counted(valid_C, weight_C * uniform),
    )


def _counted(valid_C: Tensor, value_C: Tensor) -> Tensor:
    """`where` and not a product: what an ignored token computed may be infinite."""
    return torch.where(valid_C, value_C, value_C.new_zeros(()))
