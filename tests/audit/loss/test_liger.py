"""Liger's cross-entropy, interpreted on the CPU: right in its numbers, with the findings that are true of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRUE_OF_LIGER = {"overwrites_input", "reported_z_dtype", "reported_z_no_gradient"}
"""It writes the gradient over the caller's logits; the Z it returns comes in the dtype of the logits and has a
`grad_fn` whose gradient is zero."""


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")),
    reason="liger-kernel or triton is not installed",
)
def test_liger_cross_entropy_has_the_findings_that_are_true_of_it() -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
    script = Path(__file__).with_name("liger_case.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    data = json.loads(done.stdout.strip().splitlines()[-1])
    assert {finding["id"] for finding in data["findings"] if finding["verdict"] == "finding"} == TRUE_OF_LIGER
    identified = data["identified"]
    assert identified["coef"] == pytest.approx(1e-3, rel=1e-3)
    assert identified["target"] == pytest.approx(0.0, abs=1e-3)
    assert (identified["coordinate"], identified["ce_denominator"], identified["z_denominator"]) == (
        "raw",
        "valid",
        "valid",
    )
