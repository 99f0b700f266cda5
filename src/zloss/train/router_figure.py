"""Router entropy and expert load over the steps of compared runs, as one SVG file: a line per variant, a panel per quantity.

Seeds are averaged step by step. Matched variants lie on the line of the token-layer mean, so they are dashed.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zloss.errors import MissingDependencyError
from zloss.report.figures import STYLE
from zloss.report.training_charts import COLOURS
from zloss.report.writing import write_bytes
from zloss.train.finished_run import FinishedRun
from zloss.train.moe_config import MATCHED
from zloss.train.step_log import read_steps

PANELS = {"entropy": "router entropy (nat)", "load_cv": "expert load CV"}


@dataclass(frozen=True)
class RouterFigure:
    """The averaged curves."""

    curves: dict[str, dict[str, list[float]]]
    """variant → quantity → value of every step."""

    def save(self, file: Path) -> Path:
        """Draw and write; the same curves give the same bytes."""
        try:
            from matplotlib import pyplot, rc_context
        except ImportError as error:
            raise MissingDependencyError("matplotlib", "Drawing figure files", "audit") from error
        with rc_context(STYLE):
            figure, axes = pyplot.subplots(1, len(PANELS), figsize=(9.5, 3.4))
            for axis, (name, label) in zip(axes, PANELS.items(), strict=True):
                self._panel(axis, name, label)
            axes[0].legend(fontsize=7, frameon=False)
            content = io.BytesIO()
            figure.savefig(content, format="svg", metadata={"Date": None})
            pyplot.close(figure)
        write_bytes(file, content.getvalue())
        return file

    def _panel(self, axis: Any, name: str, label: str) -> None:
        for i, (variant, quantities) in enumerate(self.curves.items()):
            values = quantities[name]
            dashed = f":{MATCHED}" in variant
            style: dict[str, Any] = {
                "linestyle": (2 * i, (4, 4)) if dashed else "-",
                "linewidth": 1.6 if dashed else 1.1,
            }
            axis.plot(range(1, len(values) + 1), values, color=COLOURS[i % len(COLOURS)], label=variant, **style)
        axis.set_xlabel("step")
        axis.set_ylabel(label)


def router_figure(runs: Sequence[FinishedRun]) -> RouterFigure:
    """The curves of runs with experts, in the order of the runs."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.method if not run.coef else f"{run.method}, λ_R {run.coef:g}", []).append(run)
    return RouterFigure({name: {key: _averaged(group, key) for key in PANELS} for name, group in groups.items()})


def _averaged(group: Sequence[FinishedRun], key: str) -> list[float]:
    seeds = [[record.telemetry.get(key) for record in read_steps(run.folder)] for run in group]
    return [_mean(values) for values in zip(*seeds, strict=False)]


def _mean(values: Sequence[float | None]) -> float:
    return statistics.fmean(math.nan if value is None else value for value in values)
