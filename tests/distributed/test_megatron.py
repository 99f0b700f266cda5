"""megatron-core's own data parallelism, with dW added to `main_grad` by `head_loss`."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.distributed.megatron_cases import CASES, main
from tests.forked import forked_ranks


@pytest.fixture(scope="module")
def answer() -> dict[str, str]:
    """One job for all cases."""
    # Imported in the job alone: it takes seconds, and changes settings of torch for the tests that follow.
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    found: dict[str, str] = json.loads(forked_ranks(2, main).splitlines()[-1])
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_overlapped_reductions_missed_a_gradient(case: str, overlap: bool, answer: dict[str, str]) -> None:
    """Megatron asserts that `param.grad` is not None, and reads `grad_added_to_main_grad`."""
    assert answer[f"{case}, overlap {overlap}"] == ""


def test_a_tied_embedding_that_megatron_would_drop_is_refused(answer: dict[str, str]) -> None:
    assert "zero_out_wgrad = True" in answer["tied without a word"]
