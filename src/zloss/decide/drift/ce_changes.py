"""Cross-entropy of two checkpoints on the same blocks: its paired change, and the stretches over which it stands still.

Δ_ij = mean over tokens of CE_j − CE_i; h_ij = t·(standard error of Δ_ij over G contiguous groups of blocks). CE is still
between i and j if |Δ_ij| + h_ij is within the tolerance.

Axes: I checkpoints, B blocks, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zloss.decide.verdicts.groups import LEAST_GROUPS
from zloss.decide.verdicts.quality import BlockCrossEntropies, quality_interval
from zloss.results.drift import CeChange
from zloss.results.validation_blocks import ValidationBlocks


@dataclass(frozen=True)
class CrossEntropies:
    """The checkpoints' cross-entropies by block, in the order of their steps."""

    steps: tuple[int, ...]
    blocks: tuple[ValidationBlocks, ...]
    tolerance: float
    """In nats."""

    def change(self, i: int, j: int) -> CeChange:
        """What CE does from checkpoint i to checkpoint j."""
        before, after = self.blocks[i], self.blocks[j]
        if None in before.ce + after.ce:
            return CeChange(self.steps[i], self.steps[j], None, None, still=False)
        interval = quality_interval(
            BlockCrossEntropies(
                np.array([before.ce], dtype=np.float64),
                np.array([after.ce], dtype=np.float64),
                np.array(before.tokens, dtype=np.float64),
            )
        )
        # One run has no spread over seeds: the interval is that of the text alone.
        half = interval.group_part
        still = interval.groups >= LEAST_GROUPS and abs(interval.difference) + half <= self.tolerance
        finite = half if math.isfinite(half) else None
        return CeChange(self.steps[i], self.steps[j], interval.difference, finite, still)

    def neighbours(self) -> tuple[CeChange, ...]:
        """The change between each two neighbouring checkpoints."""
        return tuple(self.change(i, i + 1) for i in range(len(self.steps) - 1))

    def reach(self) -> list[int]:
        """For every checkpoint i the last j up to which CE never left the tolerance around its value at i."""
        return [self._reach(i) for i in range(len(self.steps))]

    def _reach(self, i: int) -> int:
        j = i
        while j + 1 < len(self.steps) and self.change(i, j + 1).still:
            j += 1
        return j


def still_steps(reach: Sequence[int]) -> bool:
    """Whether CE stands still between any two checkpoints."""
    return any(j > i for i, j in enumerate(reach))
