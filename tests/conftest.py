"""Settings every test shares."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

import pytest

# Laws draw from hypothesis; on shared CI machines wall-clock deadlines say nothing about the code.
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Some virtual machines advertise AMX and then trap on it: oneDNN's native bf16 products would kill the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests fork, and a child cannot use the threads of OpenMP that its parent has started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests start make, pytest and our own commands: what the outer make or pytest and the terminal set must not reach them.
MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MAKEFILES", "GNUMAKEFLAGS")
TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
for name in (*MAKE, *TERMINAL, "PYTEST_ADDOPTS"):
    os.environ.pop(name, None)

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
# glibc gives every freed tensor of more than some MB back to the system, and the next one pays for its pages anew: a quarter
# of the time of a loss audit. Without effect on systems with another allocator.
with contextlib.suppress(OSError, AttributeError):
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

settings.register_profile("zloss", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("zloss")

pytest_plugins = ["tests.measured_reports"]


def pytest_collection_finish() -> None:
    """Every run of training ends with a garbage collection: leave the 700,000 objects of imported modules out of it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What is still frozen at the end would be reported as leaked by libraries that count their objects."""
    gc.unfreeze()


@pytest.fixture
def cache_of_all_tests(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, empty when the tests begin, that all processes share: the embedded model is converted in it once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    monkeypatch.setenv("ZLOSS_CACHE", str(folder))
    return folder
