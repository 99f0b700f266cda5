"""Row work in plain PyTorch, in place.

The buffer of logits is overwritten by E = exp(z − m), which serves the statistics, Wᵀp = EᵀW/S and dW alike. No second
V-wide buffer exists unless the logits are softcapped or the products take E in 16 bits.

Axes: C tokens of a chunk, V vocabulary, B buffers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from zloss.source.injection import WeightedSource
from zloss.transport.backends.narrow_parts import applied_exp, product_exp
from zloss.transport.backends.native.rows import fused_exp_rows_
from zloss.transport.backends.product_plan import ProductPlan, fp32_plan
from zloss.transport.backends.row_work import RowPass, RowSums
from zloss.transport.softcap import softcap_


def exp_rows_(z_CV: Tensor, *, norm: bool) -> RowSums:
    """Overwrite z with E = exp(z − m) and return the row sums: the one pair (m, S) that forward and backward share."""
    if (fused := fused_exp_rows_(z_CV)) is not None:
        row_max_C, sum_C, norm_C = fused
        return RowSums(row_max_C, sum_C, norm_C if norm else None)
    row_max_C = z_CV.amax(dim=1)
    z_CV.sub_(row_max_C.unsqueeze(1)).exp_()
    return RowSums(row_max_C, z_CV.sum(dim=1), torch.linalg.vector_norm(z_CV, dim=1) if norm else None)


class TorchRows:
    """Row work on 1 buffer, on 2 under softcap, and on 3 where the slope of the softcap is kept."""

    def __init__(self, softcap: float | None, *, plan: ProductPlan | None = None, keep_slope: bool = False) -> None:
        self._softcap = softcap
        self.plan = fp32_plan() if plan is None else plan
        self._keep_slope = keep_slope and softcap is not None
        self.buffers = 1 + (softcap is not None) + self._keep_slope

    def statistics(
        self,
        buffers_BCV: Tensor,
        narrow_CV: Tensor | None,
        index_C: Tensor,
        *,
        norm: bool,
        mean: bool,
        drop: bool = False,
    ) -> RowPass:
        z_CV = buffers_BCV[0]
        if self._softcap is not None:
            softcap_(z_CV, buffers_BCV[-1], self._softcap)
        target_logit_C = z_CV.gather(1, index_C.unsqueeze(1)).squeeze(1)
        mean_logit_C = z_CV.mean(dim=1) if mean else None
        sums = exp_rows_(z_CV, norm=norm)
        if drop:  # log E is z − m wherever E has not underflowed to 0, and there E·(z − m) is below rounding
            sums = replace(sums, drop_C=-torch.xlogy(z_CV, z_CV).sum(dim=1))
        shaped_CV, kept_CV = z_CV, None
        if self._softcap is not None:
            slope_CV = buffers_BCV[-1]
            shaped_CV = torch.mul(slope_CV, z_CV, out=buffers_BCV[1])
            kept_CV = slope_CV if self._keep_slope else None
        max_index_C = None
        if self.plan.narrow:
            max_index_C = z_CV.argmax(dim=1)
        e_CV = product_exp(shaped_CV, self.plan, narrow_CV)
        return RowPass(sums, target_logit_C, mean_logit_C, e_CV, z_CV, kept_CV, max_index_C)

    def source(
        self, rows: RowPass, index_C: Tensor, valid_C: Tensor, source: WeightedSource, *, through_softcap: bool
    ) -> Tensor:
        source_CV = applied_exp(rows.source_CV, self.plan).mul_(source.along_exp_C.unsqueeze(1))
        if source.along_target_C is not None:
            source_CV.scatter_add_(1, index_C.unsqueeze(1), -source.along_target_C.unsqueeze(1))
        if source.along_uniform_C is not None:
            source_CV.sub_(source.along_uniform_C.unsqueeze(1) / source_CV.shape[1])
        if through_softcap and self._softcap is not None:
            assert rows.slope_CV is not None, "made with keep_slope=False"
            source_CV.mul_(rows.slope_CV)
        # Rows of ignored tokens may have held NaN or infinities, and 0·NaN is not 0.
        return source_CV.masked_fill_(~valid_C.unsqueeze(1), 0)
