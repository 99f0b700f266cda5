"""A long stream through one statistic's full set of accumulators, its peak memory measured in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_streaming.py"
BUDGET_MB = 64


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_stream_past_the_exact_limit_stays_within_the_budget(dtype):
    command = [sys.executable, str(BENCHMARK), "--memory-only", "--values", "7000000", "--dtype", dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, at_switch = (
        float(x) for x in re.search(r"peak ([\d.]+) MB \(at the switch .* ([\d.]+) MB\)", output).groups()
    )
    value_size = 4 if dtype == "float32" else 8
    assert 2**22 * value_size / 2**20 <= at_switch <= BUDGET_MB  # the stored values are really in the measure
    # memory is flat from the switch on, so the peak of any longer stream is that of this one
    assert peak <= at_switch + 2
