"""Training curves and gradient tails of a comparison, one colour per method."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.charts.audit import Figure
from zloss.report.charts.svg import Chart, Scale, linear_scale, log_scale
from zloss.results.comparison import MethodCurves

COLOURS = ("#5f6b73", "#8a8f2a", "#b9502b", "#1d6c8c", "#7a4fa3", "#2f8f5b", "#c28a1b", "#a33b63")

PANELS = {
    # quantity: (title, label of the axis, logarithmic)
    "cross_entropy": ("Training cross-entropy", "CE in nat", False),
    "p_z_999": ("Log-normalizer tail of each step, deployed coordinate", "P_Z^99.9", True),
    "entropy": ("Router entropy of each step", "entropy in nat", False),
    "load_cv": ("Expert load of each step", "coefficient of variation", False),
    "router_log_z_p999": ("Router log-normalizer tail of each step", "p99.9 log Z_R", False),
}

Line = tuple[Sequence[float], Sequence[float]]


def colour_of(index: int) -> str:
    """The colour of the n-th method, in every figure of a page."""
    return COLOURS[index % len(COLOURS)]


def training_figures(groups: Sequence[MethodCurves], prefix: str) -> list[Figure]:
    """Panels for what the groups of a comparison's `curves` hold; `prefix` makes their ids unique on a page."""
    figures = []
    for key, (title, label, log) in PANELS.items():
        curves = [group.curves.get(key) for group in groups]
        lines: list[Line] = [((), ()) if curve is None else (curve.step, curve.value) for curve in curves]
        if any(ys for _, ys in lines):
            figures.append(_curves(title, label, f"{prefix}-{key}", lines, log=log))
    tails: list[Line] = [(group.norm_tail.norm, group.norm_tail.share) for group in groups]
    if any(norms for norms, _ in tails):
        figures.append(_tails(tails, f"{prefix}-norms"))
    return figures


def _curves(title: str, label: str, name: str, lines: Sequence[Line], *, log: bool) -> Figure:
    samples = [ys for _, ys in lines if ys]
    scale = log_scale(*samples) if log else linear_scale(*samples)
    chart = Chart(linear_scale(*(xs for xs, _ in lines if xs)), scale, "step", label, name)
    for i, (xs, ys) in enumerate(lines):
        _draw(chart, xs, ys, colour_of(i))
    return Figure(title, chart.render(), "Mean over seeds.")


def _tails(tails: Sequence[Line], name: str) -> Figure:
    """The right end of a line is what a p99 begins to miss."""
    smallest = min(share for _, shares in tails for share in shares)
    norms = log_scale(*(xs for xs, _ in tails if xs))
    chart = Chart(
        norms, Scale(smallest / 1.5, 1.2, log=True), "‖g‖₂ before clipping", "share of steps at or above", name
    )
    for i, (xs, ys) in enumerate(tails):
        _draw(chart, xs, ys, colour_of(i))
    return Figure("Gradient norm tail", chart.render(), "Finite steps of all seeds together.")


def _draw(chart: Chart, xs: Sequence[float], ys: Sequence[float], colour: str) -> None:
    usable = [(x, y) for x, y in zip(xs, ys, strict=True) if (y > 0 or not chart.y.log) and (x > 0 or not chart.x.log)]
    spots = "L".join(f"{chart.px(x):.1f},{chart.py(y):.1f}" for x, y in usable)
    if spots:
        chart.layers.append(f'<path style="fill:none;stroke:{colour};stroke-width:1.5" d="M{spots}"/>')
