"""Curves and tails of compared runs, thin enough to stand in comparison.json, from which the page draws them.

One group per method and coefficient, or router variant; seeds are averaged step by step in curves and pooled in tails.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from zloss.results.step_record import StepRecord
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.step_log import read_steps

POINTS = 300
"""Points of a curve."""
DENSE = ("p_z_999",)
ROUTED = ("entropy", "load_cv", "router_log_z_p999")
"""Telemetry that is kept beside the training cross-entropy: of the head, or of the routers where there are any."""


def training_curves(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """{name, curves: {quantity: {step, value}}, norm_tail: {norm, share}} per group; empty without step records."""
    groups: dict[str, list[list[StepRecord]]] = {}
    for run in sorted(runs, key=lambda run: (run.coef != 0, run.method, run.coef, run.seed)):
        name = f"{run.method} {run.coef:g}" if run.coef else run.method
        groups.setdefault(name, []).append(read_steps(run.folder))
    telemetry = ROUTED if any(run.moe is not None for run in runs) else DENSE
    readers = {"cross_entropy": _cross_entropy, **{key: _telemetry(key) for key in telemetry}}
    return [
        {
            "name": name,
            "curves": {
                key: _averaged([[read(step) for step in seed] for seed in seeds]) for key, read in readers.items()
            },
            "norm_tail": _norm_tail([step.grad_norm for seed in seeds for step in seed]),
        }
        for name, seeds in groups.items()
        if all(seeds)
    ]


def _cross_entropy(step: StepRecord) -> float:
    return step.cross_entropy


def _telemetry(key: str) -> Callable[[StepRecord], float]:
    def read(step: StepRecord) -> float:
        value = step.telemetry.get(key)
        return math.nan if value is None else value

    return read


def _averaged(seeds: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Mean over seeds, then over neighbouring steps, so that at most POINTS remain; `step` is the last of each."""
    length = min(map(len, seeds))
    means = [statistics.fmean(values[i] for values in seeds) for i in range(length)]
    width = max(1, math.ceil(length / POINTS))
    curve: dict[str, list[float]] = {"step": [], "value": []}
    for start in range(0, length, width):
        part = [value for value in means[start : start + width] if math.isfinite(value)]
        if part:
            curve["step"].append(min(start + width, length))
            curve["value"].append(statistics.fmean(part))
    return curve


def _norm_tail(norms: Sequence[float]) -> dict[str, list[float]]:
    """Pre-clip norms and the share of steps at or above each: all of the upper tail, every n-th step below it."""
    values = sorted(norm for norm in norms if math.isfinite(norm))
    stride = max(1, len(values) // POINTS)
    kept = [i for i in range(len(values)) if i % stride == 0 or i >= len(values) - POINTS // 3]
    return {"norm": [values[i] for i in kept], "share": [1 - i / len(values) for i in kept]}
