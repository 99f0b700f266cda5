"""Two ranks equal one process, under DDP and FSDP2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integrations.transformers.two_ranks import CASES


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    """One launch for all cases."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.integrations.transformers.two_ranks"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(case: str, differences: dict[str, dict[str, float]]) -> None:
    assert differences[case]["loss"] <= 1e-5
    assert differences[case]["gradient"] <= 1e-4
