"""The statistics of a chunk of tokens, from its row sums and E W.

Axes: C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.source.statistics import TokenStats
from zloss.transport.backends.row_work import RowSums
from zloss.transport.statistics_plan import StatisticsPlan


def chunk_stats(
    plan: StatisticsPlan,
    sums: RowSums,
    target_logit_C: Tensor,
    valid_C: Tensor,
    vocab: int,
    *,
    mu_C: Tensor | None,
    mean_logit_C: Tensor | None = None,
    mean_energy_C: Tensor | None = None,
    projected_CD: Tensor | None,
    mean_row_D: Tensor | None,
    logit_scale: float,
) -> TokenStats:
    """The statistics that the plan names; what else was computed on the way stays out.

    `mean_energy_C`: Σ_i p_i (z_i − μ), where the row sums do not give the entropy by themselves.

    ‖Wᵀp‖/‖p‖ = ‖E W‖/‖E‖: S cancels. With a logit scale s the head is s·W.
    """
    p_norm_C = gain_C = gain_centered_C = mu_residual_C = entropy_C = None
    log_s_C = sums.sum_C.log()
    if plan.entropy:
        if sums.drop_C is not None:
            entropy_C = log_s_C + sums.drop_C / sums.sum_C
        else:
            assert mean_energy_C is not None
            assert mu_C is not None
            # log Z̃ − Σ p (z − μ): the common shift is in neither term. Rounding may leave it below 0.
            entropy_C = (log_s_C + (sums.row_max_C - mu_C) - mean_energy_C).clamp_min(0)
    if plan.p_norm:
        assert sums.norm_C is not None
        p_norm_C = sums.norm_C / sums.sum_C
    if plan.gain:
        assert projected_CD is not None
        assert sums.norm_C is not None
        gain_C = abs(logit_scale) * projected_CD.norm(dim=1) / sums.norm_C
        if plan.gain_centered:
            assert mean_row_D is not None
            centered_CD = torch.addcmul(projected_CD, sums.sum_C.unsqueeze(1), mean_row_D, value=-1)
            gain_centered_C = abs(logit_scale) * centered_CD.norm(dim=1) / sums.norm_C
    if plan.mu_residual:
        assert mean_logit_C is not None
        assert mu_C is not None
        mu_residual_C = mean_logit_C - mu_C
    return TokenStats(
        row_max=sums.row_max_C,
        log_s=log_s_C,
        target_logit=torch.where(valid_C, target_logit_C, target_logit_C.new_zeros(())),
        valid=valid_C,
        vocab=vocab,
        mu=mu_C if plan.mu else None,
        p_norm=p_norm_C,
        gain=gain_C,
        gain_centered=gain_centered_C,
        entropy=entropy_C,
        mu_residual=mu_residual_C,
    )


def mean_energy(
    sums: RowSums,
    e_CV: Tensor,
    hidden_CD: Tensor,
    projected_CD: Tensor,
    mean_row_D: Tensor,
    bias_V: Tensor | None,
    mean_bias: Tensor | None,
) -> Tensor:
    """Σ_i p_i (z_i − μ) = u·(Wᵀp − w̄) + p·b − b̄ from E W: no further product with the head.

    `hidden_CD` and `bias_V` carry the logit scale.
    """
    centered_CD = projected_CD / sums.sum_C.unsqueeze(1) - mean_row_D
    energy_C = (hidden_CD * centered_CD).sum(dim=1)
    if bias_V is None or mean_bias is None:
        return energy_C
    return energy_C + (e_CV @ bias_V) / sums.sum_C - mean_bias
