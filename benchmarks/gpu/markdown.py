"""The report as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from benchmarks.gpu.record import Checked, GpuReport, Timed
from benchmarks.gpu.timing import PRODUCTS

GB = 1e9


def as_markdown(report: GpuReport) -> str:
    """Machine, timings, property tests, failures."""
    speed = ["## Speed", "", *timing_tables(report.timings), ""] if report.timings else []
    return "\n".join([*_head(report), *speed, *_laws(report), *_failures(report)]) + "\n"


def _head(report: GpuReport) -> Iterator[str]:
    machine = report.machine
    yield f"# zloss on {machine.device}"
    yield ""
    if report.quick:
        yield "**A quick run: cases and shapes are cut down. Its times say nothing.**"
        yield ""
    facts = {
        "compute capability": machine.capability,
        "memory": None if machine.memory_bytes is None else f"{machine.memory_bytes / GB:.1f} GB",
        "driver": machine.driver,
        "CUDA of torch": machine.cuda,
        "commit": report.commit,
        "command": f"`{report.command}`",
        "rounds": str(report.rounds),
        "started": report.started,
        "took": f"{report.seconds:.0f} s",
        "Triton kernels": "interpreted" if machine.interpreted else "compiled",
    }
    facts |= {name: version or "not installed" for name, version in report.versions.items()}
    yield "| | |\n|---|---|"
    yield from (f"| {name} | {value} |" for name, value in facts.items() if value is not None)
    yield ""


def _laws(report: GpuReport) -> Iterator[str]:
    cases, failed = (sum(getattr(line, name) for line in report.laws) for name in ("cases", "failed"))
    yield "## Property tests"
    yield ""
    yield f"{cases} cases against fp64 or an uncompiled call; {failed} failed."
    yield "The error is relative, in norm, for the quantity nearest to its bound."
    yield ""
    yield "| property | dtype | backend | products | cases | failed | largest error | bound | of |"
    yield "|---|---|---|---|--:|--:|--:|--:|---|"
    for line in report.laws:
        worst = line.worst
        error = "none" if worst.error is None else f"{worst.error:.1e}"
        numbers = f"{line.cases} | {line.failed} | {error} | {worst.bound:.1e}"
        where = f"{worst.quantity} ({worst.case})"
        yield f"| {line.law} | {line.dtype} | {line.backend} | {line.products} | {numbers} | {where} |"
    yield ""
    for law, why in report.not_run.items():
        yield f"Not run: {law}. {why}"
        yield ""


def _failures(report: GpuReport) -> Iterator[str]:
    if not report.failures:
        return
    yield "## Failed property tests"
    yield ""
    yield from (f"- {failure_line(one)}" for one in report.failures)
    yield ""


def failure_line(one: Checked) -> str:
    """One sentence about a case."""
    where = f"{one.law}, {one.case}, {one.dtype}, backend {one.backend}, products {one.products}"
    if one.problem is not None:
        return f"{where}: {one.problem}"
    error = "is not finite" if one.error is None else f"has an error of {one.error:.2e}"
    return f"{where}: {one.quantity} {error}, bound {one.bound:.2e}"


def timing_tables(timings: Sequence[Timed]) -> Iterator[str]:
    """One table per shape, fastest first: what `make gpu` prints."""
    yield "Forward and backward, interleaved rounds; times of the device. Peak memory is beyond the operands, gradients included."
    shapes: dict[tuple[int, int, int, str], list[Timed]] = {}
    for timed in timings:
        shapes.setdefault((timed.tokens, timed.width, timed.vocab, timed.dtype), []).append(timed)
    for (tokens, width, vocab, dtype), rows in shapes.items():
        floor = next((row.best_ms for row in rows if row.name == PRODUCTS), None)
        yield ""
        yield f"T = {tokens}, D = {width}, V = {vocab}, {dtype}"
        yield ""
        yield "| | has Z | best ms | median ms | max/min | to products | peak GB |\n|---|---|--:|--:|--:|--:|--:|"
        yield from (_timed(row, floor) for row in sorted(rows, key=lambda row: row.best_ms or math.inf))


def _timed(row: Timed, floor: float | None) -> str:
    has_z = "yes" if row.has_z else "no"
    if row.best_ms is None:
        return f"| {row.name} | {has_z} | not run: {row.why_not} | | | | |"
    ratio = "" if not floor else f"{row.best_ms / floor:.3f}"
    peak = "" if row.peak_bytes is None else f"{row.peak_bytes / GB:.2f}"
    return f"| {row.name} | {has_z} | {row.best_ms:.2f} | {row.median_ms:.2f} | {row.spread:.2f} | {ratio} | {peak} |"
