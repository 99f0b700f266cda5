"""The Triton backend run on the CPU by Triton's interpreter, against fp64.

Triton decides when it is imported whether kernels are compiled or interpreted, and other tests may have imported it
already: the checks of `interpreted/` therefore run in separate processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'zloss[triton]'")

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).with_name("interpreted")
PROCESSES = {
    "check_compile": ("check_compile",),
    "check_kernels": ("check_kernels",),
    "check_losses": ("check_losses", "check_precision", "check_products"),
}
"""The files that share a process, which takes four seconds to start."""
ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
"""The last: one test compiles one small C++ kernel, and test programs for the vector units take longer than that."""


@pytest.mark.parametrize("name", PROCESSES)
def test_interpreted(name: str, tmp_path: Path) -> None:
    paths = [str(FOLDER / f"{stem}.py") for stem in PROCESSES[name]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *paths],
        # A separate compiler cache: a library that a killed process left half-written in the shared one fails to load.
        env=os.environ | ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout


def test_every_check_is_in_one_process() -> None:
    there = sorted(path.stem for path in FOLDER.glob("check_*.py"))
    assert len(there) == 5
    assert sorted(stem for stems in PROCESSES.values() for stem in stems) == there
