"""Two ranks equal one process, under DDP and FSDP2."""

from __future__ import annotations

import json

import pytest

from tests.forked import forked_ranks
from tests.integrations.transformers.two_ranks import CASES, main


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    """One job for all cases."""
    found: dict[str, dict[str, float]] = json.loads(forked_ranks(2, main))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(case: str, differences: dict[str, dict[str, float]]) -> None:
    assert differences[case]["loss"] <= 1e-5
    assert differences[case]["gradient"] <= 1e-4
