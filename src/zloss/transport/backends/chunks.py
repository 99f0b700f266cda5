"""One chunk of tokens after its statistics, and what a pass over all chunks keeps of it.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zloss.source.injection import Injection
from zloss.source.statistics import TokenStats
from zloss.transport.backends.row_work import RowPass
from zloss.transport.statistics_plan import StatisticsPlan
from zloss.transport.targets import Targets


@dataclass(frozen=True)
class LogitsChunk:
    """The rows of a chunk with their statistics, and what is injected. The buffers behind it are reused by the next."""

    tokens: slice
    index_C: Tensor
    rows: RowPass
    stats: TokenStats
    injection: Injection


@dataclass(frozen=True)
class HeadChunk(LogitsChunk):
    """A chunk of logits that came from hidden states and the head."""

    hidden_CD: Tensor
    """s·u: the logit scale s is on the hidden states, which are narrower than the logits."""
    target_slope_C: Tensor | None
    """Slope of the softcap at the target; None without a softcap."""
    projected_CD: Tensor | None
    """E W, unnormalised."""
    mean_row_D: Tensor | None
    """w̄."""


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
