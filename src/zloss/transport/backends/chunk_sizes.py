"""How many tokens a chunk has."""

from __future__ import annotations

_BYTES = 2**27
"""Target size of the V-wide buffers of a chunk together."""


def chunk_bounds(
    tokens: int, vocab: int, itemsize: int, chunk_size: int | None, buffers: int = 1
) -> list[tuple[int, int]]:
    """Token ranges of nearly equal length whose V-wide buffers stay near 128 MB.

    Large chunks need fewer passes over dW, small ones less memory; 512 tokens at V = 50k was the best of 64..1024 on
    the CPUs measured (benchmarks/bench_head_loss.py prints the sweep).
    """
    if tokens == 0:
        return []
    size = chunk_size or min(1024, max(32, _BYTES // (vocab * itemsize * buffers)))
    count = -(-tokens // size)
    step = -(-tokens // count)
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]
