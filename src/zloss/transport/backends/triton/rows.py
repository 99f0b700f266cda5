"""The row kernels as the `RowWork` of a chunked pass: statistics of an fp32 chunk of logits, then E in its place."""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.source.injection import WeightedSource
from zloss.transport.backends.row_work import RowPass, RowSums
from zloss.transport.backends.triton.ops import exp_rows_, row_source, row_statistics


class TritonRows:
    """Row work in two kernels. Softcap and its slope stay in registers, so one V-wide buffer is enough.

    A source is formed from the logits: it needs `keep_logits`, and with it a second buffer.
    """

    def __init__(self, softcap: float | None, *, keep_logits: bool) -> None:
        self._softcap, self._keep = softcap, keep_logits
        self.buffers = 2 if keep_logits else 1

    def statistics(
        self, buffers_BCV: Tensor, index_C: Tensor, *, norm: bool, mean: bool, drop: bool = False
    ) -> RowPass:
        z_CV = buffers_BCV[0]
        vocab = z_CV.shape[1]
        numbers = row_statistics(z_CV, index_C, vocab, 1.0, self._softcap)
        row_max, total, square, logit_sum, target, drop_C = numbers.unbind()
        shaped_CV = buffers_BCV[1].copy_(z_CV) if self._keep else z_CV
        exp_rows_(shaped_CV, row_max, self._softcap)
        sums = RowSums(row_max, total, square.sqrt() if norm else None, drop_C)
        return RowPass(sums, target, logit_sum / vocab if mean else None, shaped_CV, z_CV)

    def source(
        self, rows: RowPass, index_C: Tensor, valid_C: Tensor, source: WeightedSource, *, through_softcap: bool
    ) -> Tensor:
        assert self._keep, "made with keep_logits=False"
        z_CV, row_max_C = rows.source_CV, rows.sums.row_max_C
        vocab = z_CV.shape[1]
        zero_C = torch.zeros_like(source.along_exp_C)
        source_CV: Tensor = row_source(
            z_CV,
            row_max_C,
            torch.where(valid_C, index_C, -1),
            source.along_exp_C,
            zero_C if source.along_target_C is None else source.along_target_C,
            zero_C if source.along_uniform_C is None else source.along_uniform_C / vocab,
            vocab,
            1.0,
            self._softcap,
            through_softcap,
            torch.float32,
        )
        return source_CV
