"""Gradient norm and log-normalizer tail over the steps of a training table, as one SVG file: a line per method.

Seeds are averaged step by step. The norm is the one before clipping, the tail that of the coordinate a method deploys.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zloss.errors import MissingDependencyError
from zloss.report.charts.matplotlib_files import STYLE
from zloss.report.charts.training import COLOURS
from zloss.results.step_record import StepRecord
from zloss.results.writing import write_bytes
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.step_log import read_steps

PANELS: dict[str, Callable[[StepRecord], float | None]] = {
    "‖g‖₂ before clipping": lambda record: record.grad_norm,
    "p99.9 |log Z − c| of the step": lambda record: record.telemetry.get("p_z_999"),
}


def step_means(runs: Sequence[FinishedRun], read: Callable[[StepRecord], float | None]) -> list[float]:
    """The mean over runs of every step; NaN where one of them has no finite number."""
    seeds = [[read(record) for record in read_steps(run.folder)] for run in runs]
    return [
        statistics.fmean(math.nan if value is None else value for value in values)
        for values in zip(*seeds, strict=False)
    ]


def draw_steps(file: Path, lines: Mapping[str, Sequence[FinishedRun]]) -> Path:
    """Draw and write; the same runs give the same bytes."""
    try:
        from matplotlib import pyplot, rc_context
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "Drawing figure files", "audit") from error
    with rc_context(STYLE):
        figure, axes = pyplot.subplots(1, len(PANELS), figsize=(9.5, 3.4))
        for axis, (label, read) in zip(axes, PANELS.items(), strict=True):
            for (name, runs), colour in zip(lines.items(), COLOURS, strict=False):
                values = step_means(runs, read)
                axis.plot(range(1, len(values) + 1), values, color=colour, label=name, linewidth=1.1)
            axis.set_yscale("log")
            axis.set_xlabel("step")
            axis.set_ylabel(label)
        axes[0].legend(fontsize=7, frameon=False)
        content = io.BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    write_bytes(file, content.getvalue())
    return file
