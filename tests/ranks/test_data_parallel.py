"""Data parallel training with the global normalizer equals one process; the denominator counts every token once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import zloss


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """One launch for all cases."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.ranks.data_parallel_cases"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, float] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


@pytest.mark.parametrize("case", ["ddp, adamw", "ddp, sgd", "fsdp2, adamw", "fsdp2, sgd"])
def test_two_ranks_equal_one_process(case: str, differences: dict[str, float]) -> None:
    assert differences[case] <= 1e-5


def test_a_denominator_that_forgets_the_average_shows(differences: dict[str, float]) -> None:
    assert differences["forgotten, sgd"] > 1e-2


def test_counts_of_one_process() -> None:
    targets = [torch.tensor([1, -100, 2]), torch.tensor([[-100, 3]])]
    assert float(zloss.global_normalizer(targets)) == 3
    assert float(zloss.global_normalizer(targets[0])) == 2
    assert float(zloss.global_normalizer(7, gradients=2)) == 3.5
    assert float(zloss.global_normalizer(torch.tensor([0, 5]), ignore_index=0)) == 1


def test_a_step_without_a_valid_token_divides_by_one() -> None:
    assert float(zloss.global_normalizer(torch.tensor([-100, -100]))) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"tokens": -1}, "count ≥ 0"),
        ({"tokens": 4, "gradients": "mean"}, "averaged"),
        ({"tokens": 4, "gradients": 0}, "divisor ≥ 1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(zloss.errors.InputError, match=told):
        zloss.global_normalizer(**arguments)  # type: ignore[arg-type]
