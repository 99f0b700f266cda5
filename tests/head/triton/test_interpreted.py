"""The Triton backend run on the CPU by Triton's interpreter, against fp64.

Triton decides when it is imported whether kernels are compiled or interpreted, and other tests may have imported it
already: the checks of `interpreted/` therefore run in processes of their own.
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
CHECKS = sorted(Path(__file__).with_name("interpreted").glob("check_*.py"))


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.stem)
def test_interpreted(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)],
        # A compiler cache of its own: a library that a killed process left half-written in the shared one fails to load.
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout


def test_there_are_checks() -> None:
    names = ["check_compile", "check_kernels", "check_losses", "check_precision", "check_products", "check_statistics"]
    assert [path.stem for path in CHECKS] == names
