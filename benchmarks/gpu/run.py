"""Timings of one device, then every property test on it, as one report."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import torch

from benchmarks.gpu.against_fp64 import QUICK, Sweep, autocast, confident, every_option, logits, source
from benchmarks.gpu.against_itself import checkpointing, compiled, edges, flat_memory, graphs
from benchmarks.gpu.markdown import timing_tables
from benchmarks.gpu.record import Checked, GpuReport, Timed, commit, describe_machine, law_lines, package_versions
from benchmarks.gpu.timing import QUICK_SHAPES, SHAPES, time_shape
from tests.quick_interpreter import make_interpreter_quick
from zloss.errors import ZlossError
from zloss.head.options import Backend, require_triton


def run(arguments: argparse.Namespace) -> GpuReport:
    """The report of the command line; a line on standard error for every part."""
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", file=sys.stderr, flush=True)

    device = torch.device(arguments.device)
    deadline = began + 60 * arguments.minutes
    calls = arguments.calls or (20 if arguments.quick else CALLS)
    timings: list[Timed] = []
    rounds = arguments.rounds or (1 if arguments.quick else 9)
    if not arguments.no_timing:
        shapes = arguments.shape or (QUICK_SHAPES if arguments.quick else SHAPES)
        for place, shape in enumerate(shapes, start=1):
            # Half of the time is for the timings, in equal parts.
            until = began + 30 * arguments.minutes * place / len(shapes)
            timings += time_shape(device, tuple(shape), getattr(torch, arguments.dtype), rounds, until, say)
        print("\n".join(timing_tables(timings)), flush=True)
    backends, not_run = usable_backends(device)
    checked = list(
        all_laws(device, backends, quick=arguments.quick, calls=calls, deadline=deadline, not_run=not_run, say=say)
    )
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
        not_run=not_run,
        timings=tuple(timings),
    )


# All property tests on one device, in order.

CALLS = 10_000


def usable_backends(device: torch.device) -> tuple[tuple[Backend, ...], dict[str, str]]:
    """(backends that run here, property test → why it is not run)."""
    try:
        require_triton(device, torch.float32)
    except ZlossError as error:
        return ("dense", "chunked"), {"everything in Triton": str(error)}
    return ("dense", "chunked", "triton"), {}


def all_laws(
    device: torch.device,
    backends: tuple[Backend, ...],
    *,
    quick: bool,
    calls: int,
    deadline: float,
    not_run: dict[str, str],
    say: Callable[[str], None],
) -> Iterator[Checked]:
    """Every case of every property test until the `deadline`; the tests that it cuts off are added to `not_run`."""
    sweep = QUICK if quick else Sweep()
    if "triton" in backends and device.type == "cpu":
        make_interpreter_quick()
    # Interpreted kernels take milliseconds per row: the long test leaves them out.
    without_interpreter = tuple(name for name in backends if name != "triton" or device.type == "cuda")
    laws: dict[str, Iterator[Checked]] = {
        "every option against fp64": every_option(device, sweep, backends),
        "source at the logits": source(device, sweep, backends),
        "losses of logits": logits(device, sweep, backends),
        "autocast": autocast(device, sweep, backends),
        "edges": edges(device, sweep, backends),
        "Z of confident tokens": confident(device, without_interpreter),
        "torch.compile": compiled(device, sweep, backends),
        "CUDA graphs": graphs(device, sweep, backends),
        "gradient checkpointing": checkpointing(device, sweep, backends),
        f"{calls} calls with flat memory": flat_memory(device, sweep, without_interpreter, calls),
    }
    for name, law in laws.items():
        say(name)
        for one in law:
            yield one
            if time.monotonic() > deadline:
                not_run[name] = "The time was up before its last case: --minutes sets it."
                break
