"""Laws, then timings, as one report."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime

import torch

from benchmarks.gpu.laws import CALLS, all_laws, usable_backends
from benchmarks.gpu.machine import commit, describe_machine, package_versions
from benchmarks.gpu.record import Checked, GpuReport, Timed, law_lines
from benchmarks.gpu.timing import QUICK_SHAPES, SHAPES, time_shape


def run(arguments: argparse.Namespace) -> GpuReport:
    """The report of the command line; a line on standard error for every part."""
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", file=sys.stderr, flush=True)

    device = torch.device(arguments.device)
    calls = arguments.calls or (20 if arguments.quick else CALLS)
    checked: list[Checked] = list(all_laws(device, quick=arguments.quick, calls=calls, say=say))
    timings: list[Timed] = []
    rounds = arguments.rounds or (1 if arguments.quick else 9)
    if not arguments.no_timing:
        for tokens, width, vocab in arguments.shape or (QUICK_SHAPES if arguments.quick else SHAPES):
            timings += time_shape(device, (tokens, width, vocab), getattr(torch, arguments.dtype), rounds, say)
    return GpuReport(
        machine=describe_machine(device),
        versions=package_versions(),
        commit=commit(),
        command=f"python -m benchmarks.gpu --device {arguments.device}{' --quick' if arguments.quick else ''}",
        calls=calls,
        rounds=rounds,
        started=started,
        seconds=time.monotonic() - began,
        quick=arguments.quick,
        laws=law_lines(checked),
        failures=tuple(one for one in checked if not one.held),
        not_run=usable_backends(device)[1],
        timings=tuple(timings),
    )
