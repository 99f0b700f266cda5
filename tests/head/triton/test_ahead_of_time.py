"""The row kernels compiled for GPUs that are not here: they compile, and nothing spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'zloss[triton]'")

PROGRAM = Path(__file__).with_name("compile_ahead.py")
CEILING = {"row_statistics_kernel": 96, "row_source_kernel": 64, "row_exp_kernel": 64}
"""Registers per thread. 96 with 8 warps leave room for two programs on a multiprocessor, 64 with 4 warps for eight."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_without_spilling(compiled: list[dict[str, object]]) -> None:
    rows = [row for row in compiled if not row["too wide"]]
    assert {row["target"] for row in rows} == {"sm_80", "sm_90", "gfx942"}
    assert len(rows) == 3 * 3 * (3 + 1) * 2  # targets, kernels, dtypes (one of them also unaligned), softcap
    for row in rows:
        assert row["spilled"] == 0, row
        assert 0 < row["registers"] <= CEILING[str(row["kernel"])], row


def test_a_block_that_is_too_wide_is_seen_to_spill(compiled: list[dict[str, object]]) -> None:
    rows = [row for row in compiled if row["too wide"]]
    assert len(rows) == 3
    for row in rows:
        assert row["spilled"] > 0, row
        assert row["registers"] > CEILING["row_statistics_kernel"], row
