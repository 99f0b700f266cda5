"""The shape of the hidden source, Wᵀp of the scaled head, chunk by chunk.

Axes: C tokens of a chunk, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zloss.head.arguments import HeadProblem
from zloss.head.chunked import HeadChunk, head_chunks
from zloss.statistics import TokenStats


def shaped_chunks(problem: HeadProblem) -> Iterator[tuple[HeadChunk, Tensor]]:
    """(chunk, Wᵀp [C, D]) of all tokens in order; with a softcap WᵀCp, C the slope of the cap."""
    for chunk in head_chunks(problem, back_projection=True):
        assert chunk.projected_CD is not None
        yield chunk, chunk.projected_CD * (problem.options.logit_scale / chunk.sums.sum_C).unsqueeze(1)


@dataclass(frozen=True)
class ShapedTokens:
    """What the sources of the tokens of a chunk are made of; nothing here is as wide as the vocabulary."""

    stats: TokenStats
    index_C: Tensor
    """Rows of the targets."""
    target_slope_C: Tensor | None
    """Slope of the softcap at the target's logit; None without a cap."""
    shape_CD: Tensor
    """Wᵀp."""

    @classmethod
    def of_chunk(cls, chunk: HeadChunk, shape_CD: Tensor) -> ShapedTokens:
        """Without the buffers of the chunk, which are used again."""
        return cls(chunk.stats, chunk.index_C, chunk.target_slope_C, shape_CD)


def shaped_tokens(problem: HeadProblem) -> Iterator[ShapedTokens]:
    """All tokens in order, chunk by chunk."""
    for chunk, shape_CD in shaped_chunks(problem):
        yield ShapedTokens.of_chunk(chunk, shape_CD)
