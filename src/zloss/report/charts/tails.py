"""Histograms over tokens, raw and centered on shared axes, with the reported quantile marked."""

from __future__ import annotations

import itertools

from zloss.report.charts.panel import Axis, Layer, Mark, Panel, Series, across
from zloss.report.charts.rebinning import equal_width, share_bins
from zloss.report.charts.scale import Scale, linear_scale
from zloss.report.text.numbers import both
from zloss.results.audit import AuditReport
from zloss.results.coordinate import Coordinate
from zloss.results.figure_data import DrawnHistogram, Quantity

COORDINATES: tuple[Coordinate, Coordinate] = ("raw", "centered")
TAILS: tuple[tuple[Quantity, str, str], ...] = (
    # drawn quantity, title, key of its quantile
    ("violation", "Log-normalizer tail", "p_z_999"),
    ("gain", "Gain tail", "a_p_99"),
    ("shift", "Common shift", "mu_abs_99"),
    ("delta_u", "Hidden-source tail", "delta_u_99"),
)


def tail_panels(report: AuditReport) -> list[Panel]:
    """One panel per quantity that was counted."""
    return [panel for tail in TAILS if (panel := _tail(report, *tail)) is not None]


def _tail(report: AuditReport, quantity: Quantity, title: str, key: str) -> Panel | None:
    found = _counted(report, quantity)
    if not found:
        return None
    edges = [histogram.edges for _, histogram in found]
    shared = len(set(edges)) == 1
    heights = [_heights(histogram, shared=shared) for _, histogram in found]
    present = [height for column in heights for height in column if height > 0]
    x = Axis.of(quantity, _x_scale(edges))
    y = Axis("tokens" if shared else "tokens per unit", Scale(min(present) * 0.7, max(present) * 1.8, log=True))
    layers: list[Layer] = [
        Series("steps", histogram.edges, column, name, name)
        for (name, histogram), column in zip(found, heights, strict=True)
    ]
    values = {name: getattr(getattr(report.heads, name), key) for name, _ in found}
    layers += [
        Mark("quantile", (value, value), across(y), name)
        for name, value in values.items()
        if value is not None and x.scale.low <= value <= x.scale.high
    ]
    quantile = "p99.9" if key.endswith("999") else "p99"
    caption = f"Dashed: {quantile}" + both(", ", values.get("raw"), values.get("centered"))
    return Panel(f"tail-{quantity}", title, x, y, tuple(layers), caption, 480, 270)


def _counted(report: AuditReport, quantity: Quantity) -> list[tuple[Coordinate, DrawnHistogram]]:
    """The histograms of a quantity on common bins."""
    found = [(name, report.figures.histogram(quantity, name)) for name in COORDINATES]
    counted = [(name, histogram) for name, histogram in found if histogram is not None and any(histogram.counts)]
    if quantity == "shift":
        # The centered residual is rounding, some 1e-7 of the raw shift: not a distribution to draw.
        counted = counted[:1]
    regrouped = share_bins([histogram for _, histogram in counted])
    return [(name, histogram) for (name, _), histogram in zip(counted, regrouped, strict=True)]


def _x_scale(edges: list[tuple[float, ...]]) -> Scale:
    """Bars of equal width belong on a linear axis, growing ones on a logarithmic one."""
    low, high = min(e[0] for e in edges), max(e[-1] for e in edges)
    if low > 0 and high > low and all(equal_width(e) is None for e in edges):
        return Scale(low, high, log=True)
    return linear_scale([low, high], margin=0.0)


def _heights(histogram: DrawnHistogram, *, shared: bool) -> tuple[float, ...]:
    """Counts where both coordinates share their bins; otherwise counts per unit, or the wider bins would look fuller."""
    widths = [right - left for left, right in itertools.pairwise(histogram.edges)]
    if shared or min(widths) <= 0:
        return tuple(float(count) for count in histogram.counts)
    return tuple(count / width for count, width in zip(histogram.counts, widths, strict=True))
