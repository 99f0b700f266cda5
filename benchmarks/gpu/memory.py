"""Ten thousand calls of a loss leave no memory behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch

import zloss
from benchmarks.gpu.agreement import Way
from benchmarks.gpu.every_option import Sweep
from benchmarks.gpu.record import Checked
from benchmarks.gpu.small_loss import small_loss, stepper
from zloss.head.options import Backend

ALLOWED = {"cuda": 2.0**20, "cpu": 2.0**25}
"""Bytes. Libraries may take a workspace late; the resident size of a process moves by itself."""


def held_bytes(device: torch.device) -> float:
    """Memory in tensors on a GPU; the resident size of this process without one (Linux)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return float(torch.cuda.memory_allocated(device))
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * float(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def flat_memory(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...], calls: int) -> Iterator[Checked]:
    """Growth in bytes between the third call and the last, per backend."""
    for backend in backends:
        way = Way(torch.bfloat16, backend, "auto")
        problem = small_loss(device, sweep, way.dtype)
        step = stepper(problem.target, zloss.GainAwareZLoss(1e-4), backend, way.products, sweep.chunk_size)
        growth, problem_line = None, None
        try:
            before = 0.0
            for index in range(calls):
                problem.value_and_gradients(step)
                if index == min(2, calls - 1):
                    before = held_bytes(device)
            growth = max(0.0, held_bytes(device) - before)
        except Exception as error:  # a law that cannot run does not hold
            problem_line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        yield Checked(
            "flat memory", f"{calls} calls", way.dtype_name, backend, way.products, "bytes grown", growth,
            ALLOWED[device.type], problem_line,
        )  # fmt: skip
