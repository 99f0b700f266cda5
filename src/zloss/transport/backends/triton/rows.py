"""The row kernels as the `RowWork` of a chunked pass: statistics of an fp32 chunk of logits, then E.

E replaces the logits where the products take it in fp32, and is written beside them in 16 bits otherwise. They
move one read of the logits for the statistics, one read and one write for E.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.source.injection import WeightedSource
from zloss.transport.backends.narrow_parts import applied_exp
from zloss.transport.backends.product_plan import ProductPlan, fp32_plan
from zloss.transport.backends.row_work import RowPass, RowSums
from zloss.transport.backends.triton.ops import exp_rows_, narrow_exp_, row_source, row_statistics


class TritonRows:
    """Row work in two kernels. Softcap and its slope stay in registers, so one V-wide fp32 buffer is enough.

    A source is formed from the logits: it needs `keep_logits`, and with it a second buffer where E is fp32.
    """

    def __init__(self, softcap: float | None, *, plan: ProductPlan | None = None, keep_logits: bool) -> None:
        self._softcap, self._keep = softcap, keep_logits
        self.plan = fp32_plan() if plan is None else plan
        self.buffers = 2 if keep_logits and not self.plan.narrow else 1

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
        vocab = z_CV.shape[1]
        numbers = row_statistics(z_CV, index_C, vocab, 1.0, self._softcap)
        row_max, total, square, logit_sum, target, drop_C = numbers.unbind()
        sums = RowSums(row_max, total, square.sqrt() if norm else None, drop_C)
        mean_C = logit_sum / vocab if mean else None
        if narrow_CV is not None:
            max_index_C = narrow_exp_(z_CV, narrow_CV, row_max, self.plan.exp_scale, 1.0, self._softcap)
            return RowPass(sums, target, mean_C, narrow_CV, z_CV, max_index_C=max_index_C)
        shaped_CV = buffers_BCV[1].copy_(z_CV) if self._keep else z_CV
        exp_rows_(shaped_CV, row_max, self._softcap)
        return RowPass(sums, target, mean_C, shaped_CV, z_CV)

    def source(
        self, rows: RowPass, index_C: Tensor, valid_C: Tensor, source: WeightedSource, *, through_softcap: bool
    ) -> Tensor:
        assert self._keep, "made with keep_logits=False"
        zero_C = torch.zeros_like(source.along_exp_C)
        target_C = zero_C if source.along_target_C is None else source.along_target_C
        uniform_C = zero_C if source.along_uniform_C is None else source.along_uniform_C / rows.source_CV.shape[1]
        if not self.plan.narrow:
            return self._source(rows, index_C, valid_C, source.along_exp_C, target_C, uniform_C, through_softcap)
        # E rounded as the products take it, then the rest, which is not rounded.
        assert not through_softcap, "the source before the softcap is formed in fp32 only"
        always_C = torch.ones_like(valid_C)
        e_CV = self._source(rows, index_C, always_C, torch.ones_like(zero_C), zero_C, zero_C, slope=False)
        rest_CV = self._source(rows, index_C, valid_C, zero_C, target_C, uniform_C, slope=False)
        applied_CV = applied_exp(e_CV, self.plan) * source.along_exp_C.unsqueeze(1)
        return torch.where(valid_C.unsqueeze(1), rest_CV + applied_CV, 0.0)

    def _source(
        self,
        rows: RowPass,
        index_C: Tensor,
        valid_C: Tensor,
        along_exp_C: Tensor,
        along_target_C: Tensor,
        along_uniform_C: Tensor,
        slope: bool,
    ) -> Tensor:
        z_CV = rows.source_CV
        source_CV: Tensor = row_source(
            z_CV,
            rows.sums.row_max_C,
            torch.where(valid_C, index_C, -1),
            along_exp_C,
            along_target_C,
            along_uniform_C,
            z_CV.shape[1],
            1.0,
            self._softcap,
            slope,
            torch.float32,
        )
        return source_CV
