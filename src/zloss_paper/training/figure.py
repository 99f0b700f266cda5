"""Gradient norm and log-normalizer tail over the steps of a training table, as one SVG file: a line per method.

Seeds are averaged step by step. The norm is the one before clipping, the tail that of the coordinate a method deploys.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zloss.report.charts.matplotlib_files import write_panels
from zloss.report.charts.training import Curve, step_panel
from zloss.results.step_record import StepRecord
from zloss.train.compare.finished_run import FinishedRun

DRAWN: dict[str, Callable[[StepRecord], float | None]] = {
    "grad_norm": lambda record: record.grad_norm,
    "p_z_999": lambda record: record.telemetry.get("p_z_999"),
}


def step_means(runs: Sequence[FinishedRun], read: Callable[[StepRecord], float | None]) -> list[float]:
    """The mean over runs of every step; NaN where one of them has no finite number."""
    seeds = [[read(record) for record in run.steps] for run in runs]
    return [
        statistics.fmean(math.nan if value is None else value for value in values)
        for values in zip(*seeds, strict=False)
    ]


def draw_steps(file: Path, lines: Mapping[str, Sequence[FinishedRun]]) -> Path:
    """Draw and write; the same runs give the same bytes."""
    panels = [
        step_panel(key, [Curve.of_steps(name, step_means(runs, read)) for name, runs in lines.items()])
        for key, read in DRAWN.items()
    ]
    return write_panels([file], panels)[0]
