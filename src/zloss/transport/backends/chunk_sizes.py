"""How many tokens a chunk has.

Large chunks need fewer passes over dW, small ones less memory. On the CPU the V-wide buffers stay near 128 MB: 512 tokens
at V = 50k was the fastest of 64..1024 on the CPUs measured (benchmarks/bench_head_loss.py prints the sweep).

On a GPU reading and writing an fp32 dW once per chunk moves 8·V·D bytes beside a product of 2·C·V·D operations, so it
hides behind the product from C = 4·(operations per second)/(bytes per second) tokens on: 1200 on an H100, 610 on an
A100, by the peak figures of the model in benchmarks/roofline.py. There a chunk has at least 1280 tokens and as many more
as the memory budget holds, a multiple of 128 of them, the tile of a tensor core product.
"""

from __future__ import annotations

import os

from zloss.errors import InputError

CPU_BYTES = 2**27
"""Default size of the V-wide buffers of a chunk together, off a GPU."""
GPU_BYTES = 5 * 2**28
"""The same on a GPU: 1.25 GiB."""
BUDGET_VARIABLE = "ZLOSS_CHUNK_BYTES"
"""Environment variable that replaces both defaults; the option `memory_budget` comes before it."""
GPU_TOKENS = 1280
"""Fewest tokens of a chunk on a GPU, whatever the budget; `chunk_size` alone goes below."""
TILE = 128


def chunk_bounds(
    tokens: int,
    token_bytes: int,
    chunk_size: int | None = None,
    *,
    device_type: str = "cpu",
    memory_budget: int | None = None,
) -> list[tuple[int, int]]:
    """Token ranges of nearly equal length; `token_bytes` is the size of the V-wide buffers of one token."""
    if tokens == 0:
        return []
    budget = memory_budget if memory_budget is not None else _default_budget()
    if chunk_size is not None:
        size = chunk_size
    elif device_type == "cuda":
        size = max(GPU_TOKENS, (budget or GPU_BYTES) // token_bytes // TILE * TILE)
    elif budget is not None:
        size = max(1, budget // token_bytes)
    else:
        size = min(1024, max(32, CPU_BYTES // token_bytes))
    count = -(-tokens // size)
    step = -(-tokens // count)
    if chunk_size is None and device_type == "cuda":
        step = -(-step // TILE) * TILE
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


_IN_ENVIRONMENT = os.environ.get(BUDGET_VARIABLE, "")
"""Read once: a compiler that traces a loss cannot follow the environment."""


def _default_budget() -> int | None:
    if not _IN_ENVIRONMENT:
        return None
    if not _IN_ENVIRONMENT.isdecimal() or int(_IN_ENVIRONMENT) == 0:
        raise InputError(f"{BUDGET_VARIABLE} is expected to be a number of bytes ≥ 1, but got {_IN_ENVIRONMENT!r}.")
    return int(_IN_ENVIRONMENT)
