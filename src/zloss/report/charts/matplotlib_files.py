"""Panels as files, SVG and PNG, by matplotlib: for papers and slides. The same panels give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zloss.errors import InputError, MissingDependencyError
from zloss.report.charts.geometry import geometry_panels
from zloss.report.charts.panel import TONES, Axis, Layer, Mark, Note, Panel, Series
from zloss.report.charts.scale import tick_label
from zloss.report.charts.spectrum import spectrum_panels
from zloss.report.charts.tails import tail_panels
from zloss.report.text.symbols import mathtext
from zloss.results.audit import AuditReport
from zloss.results.writing import write_bytes

FORMATS = ("svg", "png")
GEOMETRY, STEPS = (3.6, 3.3), (4.75, 3.4)
"""Inches of a panel of fig:gradient_geometry, and of a panel of curves over steps."""
FIGURES = {
    # name of the file: panels of a report, inches of one panel
    "gradient_geometry": (geometry_panels, GEOMETRY),
    "tails": (tail_panels, (3.6, 2.7)),
    "spectrum": (spectrum_panels, (3.6, 3.1)),
}
GREY, PALE = "#646b76", "#c9c5bc"
MARKS: dict[str, dict[str, Any]] = {
    "zero": {"color": PALE, "lw": 0.8},
    "diagonal": {"color": GREY, "lw": 0.8, "ls": "--"},
    "ray": {"color": GREY, "lw": 0.8, "ls": "--"},
    "quantile": {"lw": 1, "ls": "--"},
    "joined": {"color": PALE, "lw": 3},
}
DOTS: dict[str, dict[str, Any]] = {
    "cloud": {"s": 4, "alpha": 0.35, "linewidths": 0, "rasterized": True},
    "points": {"s": 6, "linewidths": 0},
    "spots": {"s": 50, "linewidths": 0, "zorder": 3},
}
STYLE: Any = {
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.color": "#e3e0da",
    "axes.edgecolor": PALE,
    "axes.axisbelow": True,
    # Text stays text in the SVG, so it can be searched and restyled.
    "svg.fonttype": "none",
    "svg.hashsalt": "zloss",
}


def write_figures(folder: Path, report: AuditReport, *, formats: Sequence[str] = FORMATS) -> list[Path]:
    """gradient_geometry, tails and spectrum in every format; a figure without data is left out."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise InputError(f"unknown figure format {unknown[0]!r}: expected {' or '.join(FORMATS)}.")
    written = []
    for name, (describe, inches) in FIGURES.items():
        if panels := describe(report):
            paths = [folder / f"{name}.{suffix}" for suffix in formats]
            written += write_panels(paths, panels, inches=inches)
    return written


def write_panels(paths: Sequence[Path], panels: Sequence[Panel], *, inches: tuple[float, float] = STEPS) -> list[Path]:
    """The panels side by side as one figure, in the format of each path's ending; `inches` is the size of one panel."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "Drawing figure files", "audit") from error
    with rc_context(STYLE):
        # The object interface keeps no global state and needs no display.
        figure = Figure(figsize=(inches[0] * len(panels), inches[1]), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            draw_panel(axes, panel)
        figure.axes[0].legend(handles=_handles(panels), frameon=False, fontsize=7)
        for path in paths:
            write_bytes(path, _encode(figure, path.suffix[1:]))
    return list(paths)


def draw_panel(axes: Any, panel: Panel) -> None:
    """One panel on one `matplotlib` Axes."""
    _set_axis(axes, "x", panel.x)
    _set_axis(axes, "y", panel.y)
    axes.set(title=mathtext(panel.title), xlabel=mathtext(panel.x.label), ylabel=mathtext(panel.y.label))
    for layer in panel.layers:
        _draw(axes, layer, panel)


def _set_axis(axes: Any, letter: str, axis: Axis) -> None:
    """Scale, limits and ticks as described; what a logarithmic axis cannot show is left out."""
    scale, ticks = axis.scale, axis.ticks()
    if scale.log:
        axes.set(**{f"{letter}scale": "log"})
    axes.set(**{f"{letter}lim": (scale.low, scale.high)})
    drawn = getattr(axes, f"{letter}axis")
    drawn.set_ticks(ticks, labels=list(axis.names) or [tick_label(tick) for tick in ticks])
    drawn.set_ticks([], minor=True)


def _draw(axes: Any, layer: Layer, panel: Panel) -> None:
    if isinstance(layer, Note):
        axes.text(layer.x, layer.y, mathtext(layer.text), fontsize=8, ha="center", va="center")
    elif isinstance(layer, Mark):
        if layer.kind == "arrow":
            (tail, head), (start, end) = layer.xs, layer.ys
            axes.annotate("", (head, end), (tail, start), arrowprops={"arrowstyle": "->", "lw": 1})
        else:
            own = {"color": TONES[layer.tone]} if layer.tone else {}
            axes.plot(layer.xs, layer.ys, **MARKS[layer.kind], **own)
    elif layer.kind == "steps":
        for fill, alpha in ((True, 0.2), (False, 1.0)):
            axes.stairs(layer.ys, layer.xs, baseline=panel.y.scale.low, color=_colour(layer), fill=fill, alpha=alpha)
    elif layer.kind == "line":
        axes.plot(layer.xs, layer.ys, color=_colour(layer), **_stroke(layer))
    else:
        axes.scatter(layer.xs, layer.ys, color=_colour(layer), **DOTS[layer.kind])


def _colour(series: Series) -> str:
    return TONES.get(series.tone, series.tone)


def _stroke(series: Series) -> dict[str, Any]:
    if series.dash is None:
        return {"linewidth": 1.1}
    return {"linewidth": 1.6, "linestyle": (series.dash, (4, 4))}


def _handles(panels: Sequence[Panel]) -> list[Any]:
    """Keys of the legend: every name once, as a line or a dot."""
    from matplotlib.lines import Line2D

    named = {series.name: series for panel in reversed(panels) for series in reversed(panel.series)}
    return [
        Line2D([], [], color=_colour(series), label=mathtext(name), **_stroke(series))
        if series.kind in ("line", "steps")
        else Line2D([], [], color=_colour(series), label=mathtext(name), ls="", marker="o", ms=4)
        for name, series in reversed(named.items())
    ]


def _encode(figure: Any, suffix: str) -> bytes:
    buffer = io.BytesIO()
    # No date inside: the same panels give the same bytes.
    figure.savefig(buffer, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
    return buffer.getvalue()
