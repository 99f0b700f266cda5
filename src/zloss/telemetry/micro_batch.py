"""What one micro-batch leaves for telemetry: statistics per token, and both parts of its loss as sums over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zloss.head.options import Reduction
from zloss.statistics import TokenStats


@dataclass(frozen=True)
class MicroBatch:
    """Detached tensors on the device; nothing here has been read by the host.

    Scaling: the parts are sums over the valid tokens, so that micro-batches and steps add up whatever divisor the loop
    uses.
    """

    stats: TokenStats
    cross_entropy: Tensor
    """Σ_t CE_t, label smoothing included; 0-d."""
    auxiliary: Tensor
    """Σ_t of the penalty, its coefficient included; 0-d."""


class HasLossParts(Protocol):
    """What is read of an output of `head_loss`, `logits_loss` or a loss that contains one."""

    @property
    def stats(self) -> TokenStats: ...

    @property
    def cross_entropy(self) -> Tensor: ...

    @property
    def auxiliary(self) -> Tensor: ...


def micro_batch(
    output: HasLossParts, reduction: Reduction = "mean", normalizer: float | Tensor | None = None
) -> MicroBatch:
    """The sums of a loss without token weights; `reduction` and `normalizer` are those that the loss was called with."""
    parts = output.cross_entropy.detach(), output.auxiliary.detach()
    if reduction == "mean":
        divisor = output.stats.valid.sum() if normalizer is None else normalizer
        parts = parts[0] * divisor, parts[1] * divisor
    return MicroBatch(output.stats, parts[0].sum(), parts[1].sum())
