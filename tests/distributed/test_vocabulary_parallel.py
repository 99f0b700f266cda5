"""A head that is divided over ranks by vocabulary rows gives the numbers of one process, and moves nothing V wide."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.shard_cases import TOKENS, WIDTH, main
from tests.forked import forked_ranks

LIMITS = {"float32": 2e-6, "float64": 1e-12, "bfloat16": 8e-3, "float16": 1e-3}


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One job for all cases of a number of ranks."""
    answer: dict[str, Any] = json.loads(forked_ranks(request.param, main))
    return answer


def test_ranks_equal_one_process(found: dict[str, Any]) -> None:
    assert len(found["worst"]) > 80
    wrong = {
        f"{title}: {name}": value
        for title, differences in found["worst"].items()
        for name, value in differences.items()
        if not value <= LIMITS[title.partition("|")[0]]
    }
    assert not wrong


def test_each_sum_over_ranks_is_needed(found: dict[str, Any]) -> None:
    assert set(found["left_out"]) == {"max_", "sum_", "start_sum_"}
    assert min(found["left_out"].values()) > 1e-3


def test_what_a_chunk_moves(found: dict[str, Any]) -> None:
    """Per call one all-gather of six integers and one sum for w̄; per chunk one MAX, one stacked SUM of numbers per token,
    and one SUM of rows: [C, 2D] with the gain, else [C, D]. The predicted token takes one more MAX."""
    few, rows = TOKENS * 6, TOKENS * WIDTH
    for statistics, wide, sums in (("audit", 2 * rows, 5), ("full", 2 * rows, 4), ("light", rows, 4)):
        names = [name for name, _ in found["collectives"][statistics]]
        sizes = [size for _, size in found["collectives"][statistics]]
        assert [name for name in names if "gather" in name] == ["allgather_"]
        assert sum("allreduce" in name for name in names) == sums
        assert sorted(sizes)[-1] == wide
        assert sorted(sizes)[-2] <= few


def test_what_ranks_disagree_on_is_named(found: dict[str, Any]) -> None:
    refused = found["refusals"]
    assert "different values in `target`" in refused["targets"]
    assert "different options" in refused["options"]
    assert "requires_grad" in refused["gradients"]
    assert "backend='dense'" in refused["dense"]
    assert "Shard(0)" in refused["columns"]
    assert "leave `group` out" in refused["both"]
    assert float(refused["replicated"]) > 0
    assert refused["tensor"] == refused["number"]  # tensor coefficients once counted as different options
