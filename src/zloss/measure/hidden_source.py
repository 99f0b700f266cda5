"""The shape of the hidden source, Wᵀp of the scaled head, chunk by chunk.

Axes: C tokens of a chunk, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from zloss.transport.backends.chunks import HeadChunk
from zloss.transport.backends.head_chunks import iterate_head_chunks
from zloss.transport.head_problem import HeadProblem


def shaped_chunks(problem: HeadProblem) -> Iterator[tuple[HeadChunk, Tensor]]:
    """(chunk, Wᵀp [C, D]) of all tokens in order; with a softcap WᵀCp, C the slope of the cap."""
    for chunk in iterate_head_chunks(problem, back_projection=True):
        assert chunk.projected_CD is not None
        yield chunk, chunk.projected_CD * (problem.options.logit_scale / chunk.rows.sums.sum_C).unsqueeze(1)
