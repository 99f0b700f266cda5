"""What one micro-batch leaves for telemetry: statistics per token, and both parts of its loss as sums over tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zloss.source.reduction import Reduction
from zloss.source.statistics import TokenStats
from zloss.transport.head_loss import HeadLossOutput


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


def micro_batch(output: HeadLossOutput, reduction: Reduction) -> MicroBatch:
    """A loss of `head_loss` or `logits_loss` without token weights and without a normalizer of the caller's."""
    tokens = output.stats.valid.sum()
    parts = output.cross_entropy.detach(), output.auxiliary.detach()
    if reduction == "mean":
        parts = parts[0] * tokens, parts[1] * tokens
    return MicroBatch(output.stats, parts[0].sum(), parts[1].sum())
