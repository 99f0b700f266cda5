"""The figures of a report as SVG text, each with a title and a caption made from the report's own numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from zloss.report.charts.rebinning import equal_width, share_bins
from zloss.report.charts.svg import Chart, Scale, linear_scale, log_scale
from zloss.report.text.numbers import coefficient, number
from zloss.results.audit import AuditReport
from zloss.results.coordinate import Coordinate
from zloss.results.figure_data import DrawnHistogram, GeometrySample, Quantity

COORDINATES: tuple[Coordinate, Coordinate] = ("raw", "centered")
RAYS = (0.3, 1, 2, 5, 10, 20, 50, 100, 300, 1000)


@dataclass(frozen=True)
class Figure:
    """A drawn panel with its words."""

    title: str
    svg: str
    caption: str


def geometry_figures(report: AuditReport, prefix: str) -> list[Figure]:
    """The three panels of paper fig:gradient_geometry; a panel without data is left out."""
    sample = report.figures.geometry
    if sample is None:
        return []
    panels = (plane(report, sample, prefix), low_rank(report, sample, prefix), transport(report, sample, prefix))
    return [panel for panel in panels if panel is not None]


def plane(report: AuditReport, sample: GeometrySample, prefix: str) -> Figure | None:
    """Panel a: Wᵀp of every token, raw and centered, on the plane of w̄ and the leading residual direction."""
    if not sample.x_raw or not sample.x_centered:
        return None
    chart = Chart(
        linear_scale(sample.x_raw, sample.x_centered, [0.0]),
        linear_scale(sample.y_raw, sample.y_centered),
        "along w̄/‖w̄‖",
        "along the leading residual direction",
        f"{prefix}-plane",
    )
    chart.line([0, 0], [chart.y.low, chart.y.high], "zero")
    chart.points(sample.x_raw, sample.y_raw, "raw", "raw")
    chart.points(sample.x_centered, sample.y_centered, "centered", "centered")
    tail, head = fmean(sample.x_raw), fmean(sample.x_centered)
    height = chart.y.high - 0.07 * (chart.y.high - chart.y.low)
    tip = math.copysign(0.02 * (chart.x.high - chart.x.low), tail - head)
    drop = 0.018 * (chart.y.high - chart.y.low)
    chart.line([tail, head], [height, height], "arrow")
    chart.line([head + tip, head, head + tip], [height + drop, height, height - drop], "arrow")
    chart.text((tail + head) / 2, height - 0.055 * (chart.y.high - chart.y.low), "−w̄", anchor="middle")
    length = f", of length {number(sample.mean_row_norm)}," if sample.mean_row_norm is not None else ""
    caption = f"Each dot is one token's Wᵀp. Centering moves all of them by the same vector −w̄{length} and changes no softmax."
    return Figure("a · One translation for every token", chart.render(), caption)


def low_rank(report: AuditReport, sample: GeometrySample, prefix: str) -> Figure | None:
    """Panel b: the part of a² inside the first 16 singular directions against a² itself."""
    if not sample.a2_raw or not sample.rank16_raw:
        return None
    exact, part = (sample.a2_raw, sample.a2_centered), (sample.rank16_raw, sample.rank16_centered)
    scale = log_scale(*exact, above_share(part, 1e-3))
    chart = Chart(log_scale(*exact), scale, "exact a²", "rank-16 part of a²", f"{prefix}-rank16")
    for css, xs, ys in zip(COORDINATES, exact, part, strict=True):
        chart.points(xs, ys, css, css)
    ends = (chart.x.low, chart.x.high)
    chart.line(ends, ends, "diagonal")
    raw, centered = report.heads.raw, report.heads.centered
    caption = "On the diagonal a token's gain lies wholly in 16 directions of the head."
    caption += _both(" Correlation ρ_16: ", raw.rho_16, centered.rho_16) + _both(
        " Mean share F_16: ", raw.f_16, centered.f_16
    )
    return Figure("b · The rank-16 part of the gain", chart.render(), caption)


def transport(report: AuditReport, sample: GeometrySample, prefix: str) -> Figure | None:
    """Panel c: ‖δ_u‖ against ‖δ_z‖; rays are constant gains."""
    if not sample.delta_z_raw:
        return None
    zs, us = (sample.delta_z_raw, sample.delta_z_centered), (sample.delta_u_raw, sample.delta_u_centered)
    top_z, top_u = (max(itertools.chain(*values), default=1.0) * 1.05 or 1.0 for values in (zs, us))
    chart = Chart(
        Scale(0, top_z),
        Scale(0, top_u),
        "source at the logits ‖δ_z‖",
        "source at the hidden state ‖δ_u‖",
        f"{prefix}-rays",
    )
    for gain in fixed_gains(zs, us):
        end = min(top_z, top_u / gain)
        chart.line([0, end], [0, gain * end], "ray")
    for css, xs, ys in zip(COORDINATES, zs, us, strict=True):
        chart.points(xs, ys, css, css)
    for gain in fixed_gains(zs, us):
        end = min(0.96 * top_z, 0.95 * top_u / gain)
        chart.text(end, gain * end, f"{gain:g}", "ray-label", "middle")
    caption = f"Slope is the gain A_p; rays mark constant gains. λ_diag = {coefficient(report.diag_coef)}."
    caption += _both(" A_p^99: ", report.heads.raw.a_p_99, report.heads.centered.a_p_99)
    return Figure("c · From logits to hidden state", chart.render(), caption)


def fixed_gains(zs: tuple[Sequence[float], ...], us: tuple[Sequence[float], ...]) -> list[float]:
    """Round gains that the tokens really reach."""
    gains = [u / z for z, u in zip(itertools.chain(*zs), itertools.chain(*us), strict=True) if z > 0]
    low, high = min(gains, default=1.0), max(gains, default=1.0)
    return [ray for ray in RAYS if low * 0.7 <= ray <= high * 1.3]


def above_share(samples: tuple[Sequence[float], ...], share: float) -> list[float]:
    """Values above a small share of the largest: one token with a vanishing rank-16 part must not stretch the axis."""
    values = list(itertools.chain(*samples))
    floor = share * max(values, default=0.0)
    return [value for value in values if value > floor]


TAILS: tuple[tuple[Quantity, str, str, str], ...] = (
    ("violation", "Log-normalizer tail", "|log Z − c|", "p_z_999"),
    ("gain", "Gain tail", "gain A_p", "a_p_99"),
    ("shift", "Common shift", "|μ|", "mu_abs_99"),
    ("delta_u", "Hidden-source tail", "‖δ_u‖", "delta_u_99"),
)


def tail_figures(report: AuditReport, prefix: str) -> list[Figure]:
    """Histograms over tokens, raw and centered on shared axes, with the reported quantile marked."""
    return [figure for tail in TAILS if (figure := _tail(report, prefix, *tail)) is not None]


def _tail(report: AuditReport, prefix: str, quantity: Quantity, title: str, label: str, key: str) -> Figure | None:
    found = [
        (css, h) for css in COORDINATES if (h := report.figures.histogram(quantity, css)) is not None and any(h.counts)
    ]
    if quantity == "shift":
        # The centered residual is rounding, some 1e-7 of the raw shift: not a distribution to draw.
        found = found[:1]
    if not found:
        return None
    found = [(css, h) for (css, _), h in zip(found, share_bins([h for _, h in found]), strict=True)]
    edges = [h.edges for _, h in found]
    low, high = min(e[0] for e in edges), max(e[-1] for e in edges)
    # Bars of equal width belong on a linear axis, growing ones on a logarithmic one.
    logarithmic = low > 0 and high > low and all(equal_width(e) is None for e in edges)
    scale = Scale(low, high, log=True) if logarithmic else linear_scale([low, high], margin=0.0)
    shared = len(set(edges)) == 1
    heights = [histogram_heights(h, shared=shared) for _, h in found]
    present = [height for column in heights for height in column if height > 0]
    chart = Chart(
        scale,
        Scale(min(present) * 0.7, max(present) * 1.8, log=True),
        label,
        "tokens" if shared else "tokens per unit",
        f"{prefix}-tail-{quantity}",
        width=480,
        height=270,
    )
    for (css, h), column in zip(found, heights, strict=True):
        chart.steps(h.edges, column, css)
    quantile = "p99.9" if key.endswith("999") else "p99"
    values = {css: getattr(getattr(report.heads, css), key) for css, _ in found}
    for css, value in values.items():
        if value is not None and scale.low <= value <= scale.high:
            chart.line([value, value], [chart.y.low, chart.y.high], f"mark {css}")
    caption = f"Dashed: {quantile}" + _both(", ", values.get("raw"), values.get("centered"))
    return Figure(title, chart.render(), caption)


def histogram_heights(histogram: DrawnHistogram, *, shared: bool) -> list[float]:
    """Counts where both coordinates share their bins; otherwise counts per unit, or the wider bins would look fuller."""
    widths = [right - left for left, right in itertools.pairwise(histogram.edges)]
    return [float(count) if shared else count / width for count, width in zip(histogram.counts, widths, strict=True)]


def spectrum_figures(report: AuditReport, prefix: str) -> list[Figure]:
    """Singular values, and the share of the head's energy they gather."""
    spectrum = report.figures.spectrum
    if spectrum is None or not spectrum.raw:
        return []
    series = [(css, values) for css, values in (("raw", spectrum.raw), ("centered", spectrum.centered)) if values]
    longest = max(len(values) for _, values in series)
    ranks = list(range(1, longest + 1))
    values = Chart(
        Scale(0.9, longest * 1.1, log=True),
        log_scale(*(v for _, v in series)),
        "index i",
        "σ_i",
        f"{prefix}-sigma",
        480,
    )
    energy = Chart(
        Scale(0.9, longest * 1.1, log=True),
        Scale(0, 1),
        "first i directions",
        "share of energy",
        f"{prefix}-energy",
        480,
    )
    for chart in (values, energy):
        chart.line([16, 16], [chart.y.low, chart.y.high], "zero")
    for css, sigma in series:
        values.line(ranks[: len(sigma)], sigma, css)
        values.points(ranks[: len(sigma)], sigma, f"{css} solid", css)
        first_share = getattr(report.heads, css).e_1
        if first_share:
            total = sigma[0] ** 2 / first_share
            shares = [min(part / total, 1.0) for part in itertools.accumulate(s * s for s in sigma)]
            energy.line(ranks[: len(sigma)], shares, css)
            energy.points(ranks[: len(sigma)], shares, f"{css} solid", css)
    raw, centered = report.heads.raw, report.heads.centered
    method = "fp64, from the Gram matrix" if spectrum.method == "exact" else spectrum.method
    return [
        Figure(
            "Singular values of the head",
            values.render(),
            f"σ_1: {_pair(raw.sigma_1, centered.sigma_1)}. Method: {method}.",
        ),
        Figure("Energy in leading directions", energy.render(), f"E_16 (line): {_pair(raw.e_16, centered.e_16)}."),
    ]


def _pair(raw: float | None, centered: float | None) -> str:
    parts = [f"{number(value)} {name}" for name, value in (("raw", raw), ("centered", centered)) if value is not None]
    return ", ".join(parts)


def _both(lead: str, raw: float | None, centered: float | None) -> str:
    pair = _pair(raw, centered)
    return f"{lead}{pair}." if pair else ""
