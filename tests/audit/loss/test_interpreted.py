"""Triton losses, interpreted on the CPU: right in their numbers, with the findings that are true of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRUE_OF = {
    # It writes the gradient over the caller's logits; the Z it returns comes in the dtype of the logits and has a
    # `grad_fn` whose gradient is zero.
    "liger": {"overwrites_input", "reported_z_dtype", "reported_z_no_gradient"},
    "ours": set(),
}


@pytest.fixture(scope="module")
def audits() -> dict[str, Any]:
    """The audits of those that are installed, from one process with the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    names = [name for name in TRUE_OF if name != "liger" or importlib.util.find_spec("liger_kernel") is not None]
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]),
    }
    words = [sys.executable, Path(__file__).with_name("interpreted_case.py"), *names]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(names, map(json.loads, done.stdout.strip().splitlines()[-len(names) :]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", TRUE_OF)
def test_an_interpreted_kernel_has_the_findings_that_are_true_of_it(case: str, audits: dict[str, Any]) -> None:
    if case not in audits:
        pytest.skip("liger-kernel is not installed")
    data = audits[case]
    assert {finding["id"] for finding in data["findings"] if finding["verdict"] == "finding"} == TRUE_OF[case]
    got = data["identified"]
    assert got["coef"] == pytest.approx(1e-3, rel=1e-3)
    assert got["target"] == pytest.approx(0.0, abs=1e-3)
    assert (got["coordinate"], got["ce_denominator"], got["z_denominator"]) == ("raw", "valid", "valid")
