"""Contiguous groups of validation blocks: the units whose spread stands for that of the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_GROUPS = 32
LEAST_GROUPS = 8
"""With fewer groups than this, quality never holds."""


def contiguous_groups(blocks: int, documents: Sequence[int] | None = None) -> NDArray[np.int64]:
    """The group of every block: its document where documents are known, else one of at most 32 runs of equal length."""
    if documents is not None and len(set(documents)) >= LEAST_GROUPS:
        _, index = np.unique(np.asarray(documents), return_inverse=True)
        return index.astype(np.int64)
    return np.arange(blocks, dtype=np.int64) * min(MOST_GROUPS, blocks) // max(blocks, 1)


def group_sums(values_B: NDArray[np.float64], group_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Σ of a per-block quantity over each group, [G]."""
    return np.bincount(group_B, weights=values_B, minlength=int(group_B.max()) + 1).astype(np.float64)
