"""The figures of a report as files, SVG and PNG, by matplotlib: for papers and slides."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zloss.errors import InputError, MissingDependencyError
from zloss.report.charts.audit import COORDINATES, TAILS, above_share, fixed_gains, histogram_heights
from zloss.report.charts.rebinning import equal_width, share_bins
from zloss.report.text.symbols import mathtext
from zloss.results.audit import AuditReport
from zloss.results.figure_data import GeometrySample
from zloss.results.writing import write_bytes

FORMATS = ("svg", "png")
COLOURS = {"raw": "#b9502b", "centered": "#1d6c8c"}
DOTS: dict[str, Any] = {"s": 4, "alpha": 0.35, "linewidths": 0, "rasterized": True}
STYLE: Any = {
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#e3e0da",
    "axes.edgecolor": "#c9c5bc",
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
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "Drawing figure files", "audit") from error
    written = []
    with rc_context(STYLE):
        for name, draw in (("gradient_geometry", draw_geometry), ("tails", draw_tails), ("spectrum", draw_spectrum)):
            figure = draw(report)
            if figure is None:
                continue
            for suffix in formats:
                path = folder / f"{name}.{suffix}"
                write_bytes(path, _encode(figure, suffix))
                written.append(path)
    return written


def _encode(figure: Any, suffix: str) -> bytes:
    buffer = io.BytesIO()
    # No date inside: the same report gives the same bytes.
    figure.savefig(buffer, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
    return buffer.getvalue()


def _panels(count: int, height: float = 3.1) -> tuple[Any, list[Any]]:
    # The object interface keeps no global state and needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * count, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def draw_geometry(report: AuditReport) -> Any | None:
    """The three panels of paper fig:gradient_geometry."""
    sample = report.figures.geometry
    if sample is None or not len(sample):
        return None
    figure, (plane, low_rank, transport) = _panels(3)
    _draw_plane(plane, sample)
    for name, exact, part in (
        ("raw", sample.a2_raw, sample.rank16_raw),
        ("centered", sample.a2_centered, sample.rank16_centered),
    ):
        low_rank.scatter(exact, part, color=COLOURS[name], label=name, **DOTS)
    ends = (
        min(itertools.chain(sample.a2_raw, sample.a2_centered)),
        max(itertools.chain(sample.a2_raw, sample.a2_centered)),
    )
    low_rank.plot(ends, ends, color="#646b76", lw=0.8, ls="--")
    low_rank.set(xscale="log", yscale="log", xlabel="exact $a^2$", ylabel="rank-16 part of $a^2$")
    low_rank.set_ylim(bottom=min(above_share((sample.rank16_raw, sample.rank16_centered), 1e-3)) * 0.8)
    zs, us = (sample.delta_z_raw, sample.delta_z_centered), (sample.delta_u_raw, sample.delta_u_centered)
    for name, z, u in zip(COORDINATES, zs, us, strict=True):
        transport.scatter(z, u, color=COLOURS[name], label=name, **DOTS)
    right, top = (max(itertools.chain(*values)) * 1.05 for values in (zs, us))
    for gain in fixed_gains(zs, us):
        end = min(right, top / gain)
        transport.plot([0, end], [0, gain * end], color="#646b76", lw=0.8, ls="--")
        transport.annotate(f"{gain:g}", (0.95 * end, 0.95 * gain * end), fontsize=7, ha="center")
    transport.set(xlim=(0, right), ylim=(0, top), xlabel=r"$\|\delta_z\|$", ylabel=r"$\|\delta_u\|$")
    plane.legend(markerscale=3, frameon=False)
    return figure


def _draw_plane(axes: Any, sample: GeometrySample) -> None:
    axes.scatter(sample.x_raw, sample.y_raw, color=COLOURS["raw"], label="raw", **DOTS)
    axes.scatter(sample.x_centered, sample.y_centered, color=COLOURS["centered"], label="centered", **DOTS)
    axes.axvline(0, color="#c9c5bc", lw=0.8)
    axes.set(xlabel=r"along $\bar w/\|\bar w\|$", ylabel="along the leading residual direction")


def draw_tails(report: AuditReport) -> Any | None:
    """Histograms over tokens with the reported quantile dashed."""
    drawable = []
    for quantity, title, label, key in TAILS:
        found = [
            (name, h)
            for name in COORDINATES
            if (h := report.figures.histogram(quantity, name)) is not None and any(h.counts)
        ]
        # The centered shift is rounding noise.
        found = found[:1] if quantity == "shift" else found
        if found:
            regrouped = share_bins([histogram for _, histogram in found])
            drawable.append((title, label, key, [(name, h) for (name, _), h in zip(found, regrouped, strict=True)]))
    if not drawable:
        return None
    figure, axes = _panels(len(drawable), 2.7)
    for ax, (title, label, key, found) in zip(axes, drawable, strict=True):
        shared = len({histogram.edges for _, histogram in found}) == 1
        for name, histogram in found:
            heights = histogram_heights(histogram, shared=shared)
            ax.stairs(heights, histogram.edges, color=COLOURS[name], fill=True, alpha=0.2)
            ax.stairs(heights, histogram.edges, color=COLOURS[name], label=name)
            value = getattr(getattr(report.heads, name), key)
            if value is not None:
                ax.axvline(value, color=COLOURS[name], ls="--", lw=1)
        ax.set(yscale="log", title=title, xlabel=mathtext(label), ylabel="tokens" if shared else "tokens per unit")
        if found[0][1].edges[0] > 0 and equal_width(found[0][1].edges) is None:
            ax.set_xscale("log")
    axes[0].legend(frameon=False)
    return figure


def draw_spectrum(report: AuditReport) -> Any | None:
    """Singular values of the head."""
    spectrum = report.figures.spectrum
    if spectrum is None or not spectrum.raw:
        return None
    figure, (axes,) = _panels(1)
    for name, values in (("raw", spectrum.raw), ("centered", spectrum.centered)):
        if values:
            axes.plot(range(1, len(values) + 1), values, color=COLOURS[name], marker=".", ms=3, lw=1, label=name)
    axes.axvline(16, color="#c9c5bc", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="index i", ylabel=r"$\sigma_i$")
    axes.legend(frameon=False)
    return figure
