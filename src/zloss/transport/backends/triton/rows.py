"""The row kernels as the `RowWork` of a chunked pass: statistics of an fp32 chunk of logits, then E in its place."""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.transport.backends.rows import RowPass, RowSums
from zloss.transport.backends.triton.ops import exp_rows_, row_source, row_statistics


class TritonRows:
    """Row work in two kernels. Softcap and its slope live in registers, so one V-wide buffer does."""

    def __init__(self, softcap: float | None, *, keep_logits: bool) -> None:
        self._softcap, self._keep = softcap, keep_logits
        self.buffers = 2 if keep_logits else 1

    def statistics(self, buffers_BCV: Tensor, index_C: Tensor, *, norm: bool, mean: bool) -> RowPass:
        z_CV = buffers_BCV[0]
        vocab = z_CV.shape[1]
        row_max, total, square, logit_sum, target = row_statistics(z_CV, index_C, vocab, 1.0, self._softcap).unbind()
        shaped_CV = buffers_BCV[1].copy_(z_CV) if self._keep else z_CV
        exp_rows_(shaped_CV, row_max, self._softcap)
        sums = RowSums(row_max, total, square.sqrt() if norm else None)
        return RowPass(sums, target, logit_sum / vocab if mean else None, shaped_CV, z_CV)

    def source(self, rows: RowPass, index_C: Tensor, p_C: Tensor, target_C: Tensor, uniform_C: Tensor) -> Tensor:
        z_CV, row_max = rows.source_CV, rows.sums.row_max_C
        # An ignored token may have computed infinities: its coefficients are 0, its source must be too.
        counted_C = torch.where((p_C != 0) | (target_C != 0) | (uniform_C != 0), index_C, -1)
        vocab = z_CV.shape[1]
        coefficients = p_C, target_C, uniform_C / vocab
        source_CV: Tensor = row_source(
            z_CV, row_max, counted_C, *coefficients, vocab, 1.0, self._softcap, False, torch.float32
        )
        return source_CV
