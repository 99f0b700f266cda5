"""One chunk of tokens after its statistics, and what a pass over all chunks keeps of it.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.ranks.token_shard import TokenChunk
from zloss.ranks.vocabulary_shard import VocabularyShard
from zloss.source.injection import Injection, WeightedSource
from zloss.source.statistics import TokenStats
from zloss.transport.backends.joined_rows import JoinedRows
from zloss.transport.backends.row_work import RowPass, RowWork
from zloss.transport.statistics_plan import StatisticsPlan
from zloss.transport.targets import Targets


@dataclass(frozen=True)
class LogitsChunk:
    """The rows of a chunk with their statistics, and what is injected. The buffers behind it are reused by the next."""

    tokens: slice | Tensor
    """Places among all tokens: a range, or an index [C] where ranks hold tokens of their own."""
    index_C: Tensor
    """Targets as own rows; 0 where the target is another rank's."""
    rows: RowPass
    """Own rows of the vocabulary; all of them on one process."""
    joined: JoinedRows
    """The sums over the whole vocabulary."""
    stats: TokenStats
    injection: Injection


def own_source(
    work: RowWork,
    shard: VocabularyShard,
    chunk: LogitsChunk,
    valid_C: Tensor,
    source: WeightedSource,
    *,
    through_softcap: bool,
) -> Tensor:
    """A source of the whole vocabulary on own rows, [C, rows]; the rows of the chunk are consumed."""
    if not shard.rows:
        return chunk.rows.source_CV
    if not shard.whole:
        # Where every own logit is -inf there is no E and no source.
        valid_C = valid_C & ~torch.isneginf(chunk.rows.sums.row_max_C)
    own = chunk.joined.own_source(source, shard)
    return work.source(chunk.rows, chunk.index_C, valid_C, own, through_softcap=through_softcap)


@dataclass(frozen=True)
class HeadChunk(LogitsChunk):
    """A chunk of logits that came from hidden states and the head."""

    hidden_CD: Tensor
    """s·u: the logit scale s is on the hidden states, which are narrower than the logits."""
    target_slope_C: Tensor | None
    """Slope of the softcap at the target; None without a softcap."""
    projected_CD: Tensor | None
    """exp(z − m) W, unnormalised; E W of own rows alone where `partial`."""
    target_rows_CD: Tensor | None
    """W[y], where a sum over ranks was needed to have it on each."""
    partial: bool
    """Whether E W and W[y] are of own rows alone, so that dh is to be summed over ranks."""
    mean_row_D: Tensor | None
    """w̄."""
    part: TokenChunk | None = None
    """Whose tokens they are, where ranks hold tokens of their own."""


class ChunkedRun:
    """What a pass over all chunks leaves: values and statistics per token, gradients of Σ_t weight_t·ℓ_t."""

    def __init__(self, targets: Targets, plan: StatisticsPlan) -> None:
        like, tokens = targets.weights.per_token, targets.index_T.shape[0]
        self.cross_entropy_T = like.new_zeros(tokens)
        self.auxiliary_T = like.new_zeros(tokens)
        self.stats = {name: like.new_zeros(tokens) for name in plan.present}
        self.gradients: tuple[Tensor | None, ...] = ()
        """One per operand of the loss; None where it was not asked for."""

    def keep(self, chunk: LogitsChunk) -> None:
        """Copy the values and statistics of a chunk to their tokens."""
        self.cross_entropy_T[chunk.tokens] = chunk.injection.cross_entropy
        self.auxiliary_T[chunk.tokens] = chunk.injection.auxiliary
        for name, value_T in self.stats.items():
            value_T[chunk.tokens] = getattr(chunk.stats, name)
