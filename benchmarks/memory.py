"""Memory of this process as the kernel counts it (Linux): what is resident, and its high-water mark."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


def status_mb(key: str) -> float:
    """`VmRSS` is what is resident now, `VmHWM` the most that was; unlike `getrusage`, without the parent's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def peak_extra_mb(run: Callable[[], object]) -> float:
    """High-water mark during `run` minus what was resident before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is allocated now
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the present size
    before = status_mb("VmRSS")
    run()
    return status_mb("VmHWM") - before
