"""A watched number at every checkpoint, with its resamples over the text.

The same resamples of groups of blocks serve all checkpoints, so the spread of a change is that of paired differences. A
quantile is tested at the highest level with at least 50 tokens beyond it.

Axes: I checkpoints, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zloss.decide.drift.watched import Watched
from zloss.decide.verdicts.coordinate import BlockMean, BlockTail, BlockValues, judged_level, resampled, text_resamples
from zloss.decide.verdicts.interval import student_quantile
from zloss.results.drift import DriftCheckpoint
from zloss.results.validation_blocks import ValidationBlocks

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class WatchedValues:
    """One number over the run."""

    shown_I: tuple[float | None, ...]
    """As the checkpoints report it."""
    tested_I: tuple[float | None, ...]
    """What changes are tested on: the same, or the quantile at `level`."""
    spread_IR: Floats | None
    """Resamples of `tested_I`; None where the number does not depend on tokens."""
    degrees: int
    """Groups of blocks minus 1."""
    level: float | None
    """The tested quantile; None for what is no quantile."""

    def change(self, i: int, j: int) -> tuple[float, float] | None:
        """(change from i to j, half the width of its 95 % interval); None where a value is missing."""
        before, after = self.tested_I[i], self.tested_I[j]
        if before is None or after is None:
            return None
        return after - before, self._noise(i, j)

    def _noise(self, i: int, j: int) -> float:
        if self.spread_IR is None:
            return 0.0
        gaps_R = self.spread_IR[j] - self.spread_IR[i]
        gaps_R = gaps_R[np.isfinite(gaps_R)]
        if len(gaps_R) < self.spread_IR.shape[1] // 2 or self.degrees < 1:
            return math.inf
        return student_quantile(self.degrees) * float(np.std(gaps_R, ddof=1))


def watched_values(
    watched: Watched, checkpoints: Sequence[DriftCheckpoint], blocks: Sequence[ValidationBlocks]
) -> WatchedValues:
    """The values of one number in the order of the checkpoints."""
    shown = tuple(getattr(getattr(each, watched.coordinate), watched.key) for each in checkpoints)
    if watched.tail is None and watched.mean is None:
        return WatchedValues(shown, shown, None, 0, None)
    level = None if watched.quantile is None else judged_level(sum(blocks[0].tokens), watched.quantile)
    found = [_by_block(watched, each) for each in blocks]
    group_B, drawn_RG = text_resamples(len(blocks[0].tokens))
    degrees = drawn_RG.shape[1] - 1
    known = [each for each in found if each is not None]
    if len(known) < len(found) or (watched.tail is not None and level is None):
        return WatchedValues(shown, (None,) * len(shown), None, degrees, level)
    once_1G = np.ones((1, drawn_RG.shape[1]), dtype=np.int64)
    finish = np.sqrt if watched.mean is not None else np.asarray
    tested = [float(finish(resampled(each, group_B, once_1G, level))[0]) for each in known]
    spread_IR = np.stack([finish(resampled(each, group_B, drawn_RG, level)) for each in known])
    return WatchedValues(
        shown, tuple(value if math.isfinite(value) else None for value in tested), spread_IR, degrees, level
    )


def _by_block(watched: Watched, blocks: ValidationBlocks) -> BlockValues | None:
    if watched.tail is not None:
        return BlockTail(blocks.tails[watched.tail], blocks.tokens) if watched.tail in blocks.tails else None
    means = blocks.means.get(watched.mean or "", ())
    known = tuple(mean for mean in means if mean is not None)
    return BlockMean(known, blocks.tokens) if known and len(known) == len(means) else None
