"""Settings every test shares."""

from __future__ import annotations

import os

# Laws draw from hypothesis; on shared CI machines wall-clock deadlines say nothing about the code.
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Some virtual machines advertise AMX and then trap on it: oneDNN's native bf16 products would kill the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests fork, and a child cannot use the threads of OpenMP that its parent has started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("zloss", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("zloss")

pytest_plugins = ["tests.measured_reports"]
