"""Training curves and tails of compared runs, as a section of the report page.

One colour per method and coefficient; seeds are averaged step by step in curves and pooled in tails.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape

from zloss.optimizer.step_record import StepRecord
from zloss.report.charts import Figure
from zloss.report.svg import Chart, Scale, linear_scale, log_scale
from zloss.train.finished_run import FinishedRun
from zloss.train.step_log import read_steps

COLOURS = ("#5f6b73", "#8a8f2a", "#b9502b", "#1d6c8c", "#7a4fa3", "#2f8f5b", "#c28a1b", "#a33b63")
POINTS = 300
"""Points of a drawn curve."""

ROUTING = (
    ("entropy", "Router entropy of each step", "entropy in nat"),
    ("load_cv", "Expert load of each step", "coefficient of variation"),
    ("router_log_z_p999", "Router log-normalizer tail of each step", "p99.9 log Z_R"),
)
"""Panels of runs with experts in place of the head's log-normalizer."""

Curve = tuple[list[float], list[float]]


def training_section(runs: Sequence[FinishedRun]) -> str:
    """HTML of the section; empty where no run has step records."""
    groups: dict[str, list[list[StepRecord]]] = {}
    routed = any(run.moe is not None for run in runs)
    for run in sorted(runs, key=lambda run: (run.coef != 0, run.method, run.coef, run.seed)):
        name = f"{run.method} {run.coef:g}" if run.coef else run.method
        groups.setdefault(name, []).append(read_steps(run.folder))
    groups = {name: seeds for name, seeds in groups.items() if any(seeds)}
    if not groups:
        return ""
    figures = [
        _curves("Training cross-entropy", "CE in nat", "train-ce", {n: _ce(s) for n, s in groups.items()}, log=False),
        _tails({name: _norms(seeds) for name, seeds in groups.items()}),
        _curves(
            "Log-normalizer tail of each step, deployed coordinate",
            "P_Z^99.9",
            "train-pz",
            {name: _telemetry(seeds, "p_z_999") for name, seeds in groups.items()},
            log=True,
        ),
    ]
    if routed:
        # The head is the same for all of them: what differs is in the routers.
        figures[2:] = [
            _curves(title, label, f"train-{key}", {n: _telemetry(s, key) for n, s in groups.items()}, log=False)
            for key, title, label in ROUTING
        ]
    chips = "".join(
        f'<span class="chip" style="color:{colour}">{escape(name)}</span>'
        for name, colour in zip(groups, _colours(len(groups)), strict=True)
    )
    drawn = "".join(
        f"<figure><h4>{escape(f.title)}</h4>{f.svg}<figcaption>{escape(f.caption)}</figcaption></figure>"
        for f in figures
        if f is not None
    )
    return (
        f'<section id="training"><h2>Training</h2><p class="legend">{chips}</p>'
        f'<div class="figures three">{drawn}</div></section>'
    )


def _ce(seeds: Sequence[Sequence[StepRecord]]) -> Curve:
    return _averaged([[record.cross_entropy for record in records] for records in seeds])


def _telemetry(seeds: Sequence[Sequence[StepRecord]], key: str) -> Curve:
    return _averaged([[record.telemetry.get(key) or math.nan for record in records] for records in seeds])


def _norms(seeds: Sequence[Sequence[StepRecord]]) -> list[float]:
    return sorted(record.grad_norm for records in seeds for record in records if math.isfinite(record.grad_norm))


def _averaged(seeds: Sequence[Sequence[float]]) -> Curve:
    """Mean over seeds, then over runs of steps, so that at most POINTS remain; x is the last step of a run."""
    length = min(map(len, seeds))
    means = [statistics.fmean(values[i] for values in seeds) for i in range(length)]
    width = max(1, math.ceil(length / POINTS))
    xs, ys = [], []
    for start in range(0, length, width):
        part = [value for value in means[start : start + width] if math.isfinite(value)]
        if part:
            xs.append(float(min(start + width, length)))
            ys.append(statistics.fmean(part))
    return xs, ys


def _curves(title: str, label: str, name: str, curves: dict[str, Curve], *, log: bool) -> Figure | None:
    if not any(ys for _, ys in curves.values()):
        return None
    samples = [ys for _, ys in curves.values()]
    chart = Chart(
        linear_scale(*(xs for xs, _ in curves.values())),
        log_scale(*samples) if log else linear_scale(*samples),
        "step",
        label,
        name,
    )
    for (xs, ys), colour in zip(curves.values(), _colours(len(curves)), strict=True):
        _line(chart, xs, ys, colour)
    return Figure(title, chart.render(), "Mean over seeds.")


def _tails(norms: dict[str, list[float]]) -> Figure | None:
    """Share of steps whose pre-clip norm lies above x: the right end is what a p99 begins to miss."""
    if not any(norms.values()):
        return None
    smallest = 1 / max(len(values) for values in norms.values() if values)
    chart = Chart(
        log_scale(*norms.values()),
        Scale(smallest / 1.5, 1.2, log=True),
        "‖g‖₂ before clipping",
        "share of steps at or above",
        "train-norms",
    )
    for values, colour in zip(norms.values(), _colours(len(norms)), strict=True):
        # All of the upper tail, and every n-th step below it.
        stride = max(1, len(values) // POINTS)
        kept = [i for i in range(len(values)) if i % stride == 0 or i >= len(values) - POINTS // 3]
        _line(chart, [values[i] for i in kept], [1 - i / len(values) for i in kept], colour)
    return Figure("Gradient norm tail", chart.render(), "Finite steps of all seeds together.")


def _line(chart: Chart, xs: Sequence[float], ys: Sequence[float], colour: str) -> None:
    usable = [(x, y) for x, y in zip(xs, ys, strict=True) if (y > 0 or not chart.y.log) and (x > 0 or not chart.x.log)]
    spots = "L".join(f"{chart.px(x):.1f},{chart.py(y):.1f}" for x, y in usable)
    if spots:
        chart.layers.append(f'<path style="fill:none;stroke:{colour};stroke-width:1.5" d="M{spots}"/>')


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
