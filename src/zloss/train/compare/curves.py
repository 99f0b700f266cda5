"""Curves and tails of compared runs, thinned to a few hundred points for comparison.json, from which the page draws them.

One group per method and coefficient, or router variant; seeds are averaged step by step in curves and pooled in tails.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from zloss.results.method_curves import Curve, MethodCurves, NormTail
from zloss.results.step_record import StepRecord
from zloss.train.compare.finished_run import FinishedRun

POINTS = 300
"""Most points of a curve."""
DENSE = ("p_z_999",)
ROUTED = ("entropy", "load_cv", "router_log_z_p999")
"""Telemetry that is kept beside the training cross-entropy: of the head, or of the routers where there are any."""


def training_curves(runs: Sequence[FinishedRun]) -> tuple[MethodCurves, ...]:
    """One record per group; a group with a run that has no step records is left out."""
    groups: dict[str, list[list[StepRecord]]] = {}
    for run in sorted(runs, key=lambda run: (run.coef != 0, run.method, run.coef, run.seed)):
        name = f"{run.method} {run.coef:g}" if run.coef else run.method
        groups.setdefault(name, []).append(run.steps)
    telemetry = ROUTED if any(run.moe is not None for run in runs) else DENSE
    readers = {"cross_entropy": _cross_entropy, **{key: _telemetry(key) for key in telemetry}}
    return tuple(
        MethodCurves(
            name=name,
            curves={key: _averaged([[read(step) for step in seed] for seed in seeds]) for key, read in readers.items()},
            norm_tail=_norm_tail([step.grad_norm for seed in seeds for step in seed]),
        )
        for name, seeds in groups.items()
        if all(seeds)
    )


def _cross_entropy(step: StepRecord) -> float:
    return step.cross_entropy


def _telemetry(key: str) -> Callable[[StepRecord], float]:
    def read(step: StepRecord) -> float:
        value = step.telemetry.get(key)
        return math.nan if value is None else value

    return read


def _averaged(seeds: Sequence[Sequence[float]]) -> Curve:
    """Mean over seeds, then over neighbouring steps, so that at most POINTS remain."""
    length = min(map(len, seeds))
    means = [statistics.fmean(values[i] for values in seeds) for i in range(length)]
    width = max(1, math.ceil(length / POINTS))
    points: list[tuple[int, float]] = []
    for start in range(0, length, width):
        part = [value for value in means[start : start + width] if math.isfinite(value)]
        if part:
            points.append((min(start + width, length), statistics.fmean(part)))
    return Curve(tuple(step for step, _ in points), tuple(value for _, value in points))


def _norm_tail(norms: Sequence[float]) -> NormTail:
    """Pre-clip norms and the share of steps at or above each: all of the upper tail, every n-th step below it."""
    values = sorted(norm for norm in norms if math.isfinite(norm))
    stride = max(1, len(values) // POINTS)
    kept = [i for i in range(len(values)) if i % stride == 0 or i >= len(values) - POINTS // 3]
    return NormTail(tuple(values[i] for i in kept), tuple(1 - i / len(values) for i in kept))
