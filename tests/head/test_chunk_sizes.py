"""How many tokens a chunk has: a cache on the CPU, a memory budget and whole tiles on a GPU."""

from __future__ import annotations

import itertools

import pytest

from zloss import errors
from zloss.head import options
from zloss.head.options import chunk_bounds


def lengths(*args: int | None, **options: object) -> list[int]:
    bounds = chunk_bounds(*args, **options)  # type: ignore[arg-type]
    assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
    return [stop - start for start, stop in bounds]


def test_on_the_cpu_buffers_stay_near_128_mb() -> None:
    assert lengths(0, 4) == []
    assert lengths(1000, 4 * 50257) == [500, 500]
    assert lengths(5000, 4 * 100) == [1000] * 5
    assert max(lengths(5000, 4 * 10**8)) == 32
    assert lengths(10, 4, 4) == [4, 4, 2]


@pytest.mark.parametrize(
    ("tokens", "vocab"), list(itertools.product((100, 1281, 16384, 65536), (32768, 131072, 262144)))
)
def test_on_a_gpu_chunks_are_whole_tiles_and_never_few_tokens(tokens: int, vocab: int) -> None:
    found = lengths(tokens, 6 * vocab, device_type="cuda")
    assert sum(found) == tokens
    assert all(length % 128 == 0 for length in found[:-1])
    budgeted = options.GPU_BYTES // (6 * vocab)
    assert found[0] <= max(1280, budgeted)
    # Equal chunks may be shorter than the smallest of the rule, by less than the tokens spread over them.
    assert found[0] >= min(tokens, 1280 * 0.5)
    assert len(found) == -(-tokens // max(1280, budgeted // 128 * 128))


def test_a_budget_and_a_chunk_size_come_first() -> None:
    assert lengths(8192, 1000, device_type="cuda", memory_budget=2048 * 1000) == [2048] * 4
    assert max(lengths(8192, 1000, device_type="cuda", memory_budget=1)) <= 1280
    assert lengths(10, 1000, memory_budget=5000) == [5, 5]
    assert lengths(300, 1000, 100, device_type="cuda", memory_budget=1) == [100, 100, 100]


def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_IN_ENVIRONMENT", "5000")
    assert lengths(10, 1000) == [5, 5]
    assert lengths(10, 1000, memory_budget=10000) == [10]
    monkeypatch.setattr(options, "_IN_ENVIRONMENT", "many")
    with pytest.raises(errors.InputError, match="ZLOSS_CHUNK_BYTES"):
        chunk_bounds(10, 1000)
