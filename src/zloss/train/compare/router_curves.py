"""Router quantities over the steps of finished runs, averaged over seeds step by step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from zloss.train.compare.finished_run import FinishedRun

QUANTITIES = ("entropy", "load_cv")


def router_curves(runs: Sequence[FinishedRun]) -> dict[str, dict[str, list[float]]]:
    """variant → quantity → value of every step, in the order of the runs."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.method if not run.coef else f"{run.method}, λ_R {run.coef:g}", []).append(run)
    return {name: {key: _averaged(group, key) for key in QUANTITIES} for name, group in groups.items()}


def _averaged(group: Sequence[FinishedRun], key: str) -> list[float]:
    seeds = [[record.telemetry.get(key) for record in run.steps] for run in group]
    return [_mean(values) for values in zip(*seeds, strict=False)]


def _mean(values: Sequence[float | None]) -> float:
    return statistics.fmean(math.nan if value is None else value for value in values)
