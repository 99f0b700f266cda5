"""What a backend returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zloss.source.statistics import TokenStats
from zloss.transport.backends.chunks import ChunkedRun
from zloss.transport.targets import Targets


@dataclass(frozen=True)
class LossParts:
    """The loss, reduced, with gradient; its two parts, detached; the statistics of all tokens on one axis."""

    loss: Tensor
    cross_entropy: Tensor
    auxiliary: Tensor
    stats: TokenStats


def reduced(targets: Targets, value_T: Tensor) -> Tensor:
    """Σ_t w_t·value_t for "mean" and "sum", w_t·value_t for "none"; 0 at ignored tokens."""
    weighted_T = targets.weighted(value_T)
    return weighted_T if targets.weights.reduction == "none" else weighted_T.sum()


def parts_of(loss: Tensor, run: ChunkedRun, targets: Targets, vocab: int) -> LossParts:
    """The parts of a loss that was computed in chunks."""
    stats = TokenStats(valid=targets.valid_T, vocab=vocab, **run.stats)
    return LossParts(loss, reduced(targets, run.cross_entropy_T), reduced(targets, run.auxiliary_T), stats)
