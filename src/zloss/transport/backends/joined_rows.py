"""The row statistics of a chunk over the whole vocabulary, from those of the rows that this rank holds.

Rank r has E_r = exp(z − m_r) with its own maximum m_r. With m = max_r m_r and the factor f_r = exp(m_r − m):

    S = Σ_r f_r S_r,   ‖exp(z − m)‖² = Σ_r (f_r norm_r)²,   Σ exp(z − m)(m − z) = Σ_r f_r (drop_r + S_r (m − m_r))

One MAX and one SUM over ranks of a few numbers per token. E_r itself is never rescaled: f_r goes into coefficients.

Axes: C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.ranks.vocabulary_shard import VocabularyShard
from zloss.source.injection import WeightedSource
from zloss.transport.backends.row_work import RowPass, RowSums, RowWork


@dataclass(frozen=True)
class JoinedRows:
    """What the whole vocabulary says of the tokens of a chunk."""

    sums: RowSums
    target_logit_C: Tensor
    mean_logit_C: Tensor | None
    factor_C: Tensor | None
    """f_r = exp(m_r − m), by which own E is multiplied; None where the vocabulary is whole."""
    own_C: Tensor | None
    """Where the target is an own row; None where all are."""

    def own_exp(self, along_exp_C: Tensor) -> Tensor:
        """A coefficient of exp(z − m) as one of own E = exp(z − m_r)."""
        return along_exp_C if self.factor_C is None else along_exp_C * self.factor_C

    def scaled_rows(self, own_CD: Tensor) -> Tensor:
        """E W of own rows in the scale of the whole: exp(z − m) W. A rank without E adds nothing."""
        if self.factor_C is None:
            return own_CD
        factor_C1 = self.factor_C.unsqueeze(1)
        return torch.where(factor_C1 > 0, own_CD * factor_C1, own_CD.new_zeros(()))

    def own_target(self, along_target_C: Tensor) -> Tensor:
        """A coefficient of onehot(y), 0 where the target is another rank's."""
        if self.own_C is None:
            return along_target_C
        return torch.where(self.own_C, along_target_C, along_target_C.new_zeros(()))

    def own_source(self, source: WeightedSource, shard: VocabularyShard) -> WeightedSource:
        """The source on own rows. Row work divides the uniform part by own rows, so it is given their share of V."""
        if shard.whole:
            return source
        target_C, uniform_C = source.along_target_C, source.along_uniform_C
        return WeightedSource(
            along_exp_C=self.own_exp(source.along_exp_C),
            along_target_C=None if target_C is None else self.own_target(target_C),
            along_uniform_C=None if uniform_C is None else uniform_C * (shard.rows / shard.total),
        )


def row_pass(
    work: RowWork, buffers_BCV: Tensor, narrow_CV: Tensor | None, index_C: Tensor, *, norm: bool, mean: bool, drop: bool
) -> RowPass:
    """The row work on own logits; a rank without rows has nothing to work on."""
    if buffers_BCV.shape[2]:
        return work.statistics(buffers_BCV, narrow_CV, index_C, norm=norm, mean=mean, drop=drop)
    return _empty_row_pass(buffers_BCV[0], narrow_CV, norm=norm, mean=mean, drop=drop)


def _empty_row_pass(own_CV: Tensor, narrow_CV: Tensor | None, *, norm: bool, mean: bool, drop: bool) -> RowPass:
    """The row pass of a rank without rows: no maximum, and sums of 0. `own_CV` is [C, 0]."""
    tokens = own_CV.shape[0]
    zero_C = own_CV.new_zeros(tokens)
    sums = RowSums(torch.full_like(zero_C, -torch.inf), zero_C, zero_C if norm else None, zero_C if drop else None)
    index_C = torch.zeros(tokens, dtype=torch.int64, device=own_CV.device)
    return RowPass(
        sums, zero_C, zero_C if mean else None, own_CV if narrow_CV is None else narrow_CV, own_CV, max_index_C=index_C
    )


def join_rows(shard: VocabularyShard, rows: RowPass, own_C: Tensor | None, *, drop: bool) -> JoinedRows:
    """`rows` of every rank as one; `drop` says whether the sum for the entropy is one of them."""
    sums = rows.sums
    if own_C is None:
        return JoinedRows(sums, rows.target_logit_C, rows.mean_logit_C, None, None)
    row_max_C = shard.max_(sums.row_max_C.clone())
    # A rank whose every logit is -inf has no E: its sums are NaN, and its share is 0.
    present_C = ~torch.isneginf(sums.row_max_C)
    below_C = torch.where(present_C, sums.row_max_C - row_max_C, -torch.inf)
    factor_C = below_C.exp()
    parts = [torch.where(own_C, rows.target_logit_C, 0.0), _share(sums.sum_C * factor_C, present_C)]
    if sums.norm_C is not None:
        parts.append(_share((sums.norm_C * factor_C).square(), present_C))
    if drop:
        assert sums.drop_C is not None
        parts.append(_share(factor_C * (sums.drop_C - sums.sum_C * below_C), factor_C > 0))
    if rows.mean_logit_C is not None:
        parts.append(rows.mean_logit_C * shard.rows if shard.rows else torch.zeros_like(rows.mean_logit_C))
    summed = iter(shard.sum_(torch.stack(parts)).unbind())
    target_logit_C, sum_C = next(summed), next(summed)
    joined = RowSums(
        row_max_C,
        sum_C,
        None if sums.norm_C is None else next(summed).sqrt(),
        next(summed) if drop else None,
    )
    mean_logit_C = None if rows.mean_logit_C is None else next(summed) / shard.total
    return JoinedRows(joined, target_logit_C, mean_logit_C, factor_C, own_C)


def clear_absent_rows_(rows: RowPass) -> None:
    """E of 0, and not of NaN, at the tokens for which every own logit is -inf."""
    absent_C1 = torch.isneginf(rows.sums.row_max_C).unsqueeze(1)
    rows.e_CV.masked_fill_(absent_C1, 0)


def _share(value_C: Tensor, present_C: Tensor) -> Tensor:
    return torch.where(present_C, value_C, value_C.new_zeros(()))
