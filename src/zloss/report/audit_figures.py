"""The figures of an audit: gradient geometry, tails over tokens, spectrum of the head, and several audits on one axis."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from zloss.report import figures as fig
from zloss.report.document import Figure
from zloss.report.figures import CENTERED, LARGEST, RAW, SMALLEST, SOFT, STRONG, TONES
from zloss.report.numbers import both, number, pair
from zloss.results.audit import AuditReport, DrawnHistogram, GeometrySample, Quantity
from zloss.results.options import Coordinate
from zloss.results.quantities import HEADLINE, NAMES, coefficient, symbol

HEADS: dict[Coordinate, str] = {"raw": RAW, "centered": CENTERED}
RAYS = (0.3, 1, 2, 5, 10, 20, 50, 100, 300, 1000)
LOW_RANK = 16
"""The rank of E_16, F_16 and ρ_16."""
MOST_BARS = 80
TAILS: dict[Quantity, str] = {
    "violation": "p_z_999", "gain": "a_p_99", "shift": "mu_abs_99", "delta_u": "delta_u_99",
}  # fmt: skip
"""Drawn quantity → key of its quantile."""


def audit_figures(report: AuditReport) -> dict[str, list[Figure]]:
    """Name of the figure file → its panels, as far as the report has data for them."""
    return {
        "gradient_geometry": geometry_figures(report),
        "tails": tail_figures(report),
        "spectrum": spectrum_figures(report),
    }


def geometry_figures(report: AuditReport) -> list[Figure]:
    """The three panels of paper fig:gradient_geometry: translation by −w̄, rank-16 part of the gain, logits to hidden."""
    sample = report.figures.geometry
    if sample is None:
        return []
    figures = (_plane(sample), _low_rank(report, sample), _transport(report, sample))
    return [figure for figure in figures if figure is not None]


def _plane(sample: GeometrySample) -> Figure | None:
    """Panel a: Wᵀp of every token, raw and centered, on the plane of w̄ and the leading residual direction."""
    if not sample.x_raw or not sample.x_centered:
        return None
    wide, high = (
        fig.linear_domain(sample.x_raw, sample.x_centered, [0.0]),
        fig.linear_domain(sample.y_raw, sample.y_centered),
    )
    tail, head = fmean(sample.x_raw), fmean(sample.x_centered)
    top = high[1] - 0.07 * (high[1] - high[0])
    length = f", of length {number(sample.mean_row_norm)}," if sample.mean_row_norm is not None else ""
    return fig.panel(
        "plane",
        "a · One translation for every token",
        (fig.axis("along w̄/‖w̄‖", wide), fig.axis("along the leading residual direction", high)),
        TONES.items(),
        [
            fig.reference((0.0, 0.0), high),
            *_clouds((sample.x_raw, sample.x_centered), (sample.y_raw, sample.y_centered)),
            *fig.arrow(tail, head, top),
            fig.note((tail + head) / 2, top, "−w̄", dy=14),
        ],
        f"Each dot is one token's Wᵀp. Centering moves all of them by the same vector −w̄{length} and leaves "
        f"every softmax as it is. Mean over the tokens along w̄: {pair(tail, head)}.",
    )


def _low_rank(report: AuditReport, sample: GeometrySample) -> Figure | None:
    """Panel b: the part of a² inside the first 16 singular directions against a² itself."""
    if not any(a2 > 0 for a2 in sample.a2_raw) or not sample.rank16_raw:
        return None
    gains, parts = (sample.a2_raw, sample.a2_centered), (sample.rank16_raw, sample.rank16_centered)
    wide = fig.log_domain(*gains)
    # One token with a vanishing rank-16 part must not stretch the axis.
    least = 1e-3 * max(itertools.chain(*parts))
    high = fig.log_domain(*gains, [value for value in itertools.chain(*parts) if value > least])
    raw, centered = report.heads.raw, report.heads.centered
    return fig.panel(
        "rank16",
        "b · The rank-16 part of the gain",
        (fig.axis("exact a²", wide, log=True), fig.axis_of("rank16", high, log=True)),
        TONES.items(),
        [*_clouds(gains, parts, log=True), fig.reference(wide, wide, color=SOFT, dash=(5, 4))],
        "On the diagonal a token's gain lies wholly in 16 directions of the head."
        + both(f" Mean share {symbol('f_16')}: ", raw.f_16, centered.f_16)
        + both(f" Correlation {symbol('rho_16')}: ", raw.rho_16, centered.rho_16),
        of="rank16",
    )


def _transport(report: AuditReport, sample: GeometrySample) -> Figure | None:
    """Panel c: ‖δ_u‖ against ‖δ_z‖; rays are the round gains that the tokens really reach."""
    if not sample.delta_z_raw:
        return None
    zs, us = (sample.delta_z_raw, sample.delta_z_centered), (sample.delta_u_raw, sample.delta_u_centered)
    right, top = _beyond(zs), _beyond(us)
    gains = [u / z for z, u in zip(itertools.chain(*zs), itertools.chain(*us), strict=True) if z > 0]
    rays, labels = [], []
    for gain in (ray for ray in RAYS if gains and min(gains) * 0.7 <= ray <= max(gains) * 1.3):
        end, at = min(right, top / gain), min(0.96 * right, 0.88 * top / gain)
        rays.append(fig.reference((0.0, end), (0.0, gain * end), color=SOFT, dash=(5, 4)))
        # To the left of its ray, which falls off there.
        labels.append(fig.note(at, gain * at, f"{gain:g}", dy=-3, dx=-5, align="right", baseline="bottom"))
    x, y = "norm of the Z source at the logits", "norm at the hidden state"
    return fig.panel(
        "rays",
        "c · From logits to hidden state",
        (fig.axis(x, (0.0, right)), fig.axis(y, (0.0, top))),
        TONES.items(),
        [*rays, *_clouds(zs, us), *labels],
        f"Slope is the gain A_p; rays mark constant gains. {symbol('diag_coef')} = {coefficient(report.diag_coef)}."
        + both(f" {symbol('a_p_99')}: ", report.heads.raw.a_p_99, report.heads.centered.a_p_99)
        + both(f" {symbol('delta_u_99')}: ", report.heads.raw.delta_u_99, report.heads.centered.delta_u_99),
        of="delta_u",
    )


def _clouds(xs: Sequence[fig.Values], ys: Sequence[fig.Values], *, log: bool = False) -> list[fig.Spec]:
    """The tokens, raw and centered."""
    found = zip((RAW, CENTERED), xs, ys, strict=True)
    return [
        fig.dots([fig.curve(name, x, y, log_x=log, log_y=log)], hollow=name == CENTERED) for name, x, y in found if x
    ]


def _beyond(samples: Iterable[Sequence[float]]) -> float:
    """Slightly above the largest value; 1 for a head of zeros, which has no source."""
    largest = max(itertools.chain(*samples), default=0.0)
    return min(largest, LARGEST) * 1.05 if largest > SMALLEST else 1.0


def thin(report: AuditReport, share: float) -> AuditReport:
    """Keep about `share` of the sampled tokens: the one per cent with the largest ‖δ_u‖ first, then evenly spaced ones."""
    sample = report.figures.geometry
    if share >= 1 or sample is None:
        return report
    size, wanted = len(sample), int(len(sample) * share)
    strength = [
        max(both_heads)
        for both_heads in zip(sample.delta_u_raw, sample.delta_u_centered or sample.delta_u_raw, strict=True)
    ]
    order = sorted(range(len(strength)), key=lambda i: -strength[i])
    keep = {*order[: min(wanted, size // 100)], *(i * size // max(wanted, 1) for i in range(wanted))}
    columns: dict[str, Any] = {
        field.name: tuple(column[i] for i in sorted(keep))
        for field in dataclasses.fields(sample)
        if isinstance(column := getattr(sample, field.name), tuple) and len(column) == size
    }
    thinned = dataclasses.replace(sample, **columns)
    return dataclasses.replace(report, figures=dataclasses.replace(report.figures, geometry=thinned))


def tail_figures(report: AuditReport) -> list[Figure]:
    """A histogram for each quantity that was counted, raw and centered on shared axes, with the reported quantile marked."""
    return [figure for tail in TAILS.items() if (figure := _tail(report, *tail)) is not None]


def _tail(report: AuditReport, quantity: Quantity, key: str) -> Figure | None:
    found = {name: report.figures.histogram(quantity, name) for name in HEADS}
    counted = {name: histogram for name, histogram in found.items() if histogram is not None and any(histogram.counts)}
    if quantity == "shift":
        # The centered residual is rounding, some 1e-7 of the raw shift: not a distribution to draw.
        counted = dict(itertools.islice(counted.items(), 1))
    if not counted:
        return None
    counted = dict(zip(counted, share_bins(list(counted.values())), strict=True))
    edges = [histogram.edges for histogram in counted.values()]
    shared = len(set(edges)) == 1
    heights = {name: _heights(histogram, shared=shared) for name, histogram in counted.items()}
    present = [height for column in heights.values() for height in column if height > 0]
    floor, top = max(min(present) * 0.7, SMALLEST), max(min(max(present) * 1.8, LARGEST), 10 * SMALLEST)
    wide, log = _tail_domain(edges)
    values = {name: getattr(getattr(report.heads, name), key) for name in counted}
    layers = [
        part
        for name in counted
        for part in fig.steps(HEADS[name], counted[name].edges, heights[name], floor, dashed=name == "centered")
    ]
    marked = {HEADS[name]: value for name, value in values.items() if value is not None and wide[0] <= value <= wide[1]}
    quantile = "p99.9" if key.endswith("999") else "p99"
    return fig.panel(
        f"tail-{quantity}",
        NAMES[key],
        (
            fig.axis_of(quantity, wide, log=log),
            fig.axis("tokens" if shared else "tokens per unit", (floor, top), log=True),
        ),
        ((HEADS[name], TONES[HEADS[name]]) for name in counted),
        [*layers, *([fig.rules(marked)] if marked else [])],
        f"Vertical lines: {quantile}"
        + both(", ", values.get("raw"), values.get("centered"))
        + (" Centered, it is rounding and not drawn." if quantity == "shift" else ""),
        of=quantity,
        height=210,
    )


def _tail_domain(edges: list[tuple[float, ...]]) -> tuple[fig.Domain, bool]:
    """Bars of equal width belong on a linear axis, growing ones on a logarithmic one."""
    low, high = min(e[0] for e in edges), max(e[-1] for e in edges)
    if low > 0 and high > low and all(equal_width(e) is None for e in edges):
        return (max(low, SMALLEST), max(high, 10 * SMALLEST)), True
    return fig.linear_domain([low, high], margin=0.0), False


def _heights(histogram: DrawnHistogram, *, shared: bool) -> tuple[float, ...]:
    """Counts where both coordinates share their bins; otherwise counts per unit, or the wider bins would look fuller."""
    widths = [right - left for left, right in itertools.pairwise(histogram.edges)]
    if shared or min(widths) <= 0:
        return tuple(float(count) for count in histogram.counts)
    return tuple(count / width for count, width in zip(histogram.counts, widths, strict=True))


def share_bins(histograms: Sequence[DrawnHistogram], most: int = MOST_BARS) -> list[DrawnHistogram]:
    """The same counts on common bins, at most `most`; histograms whose bins do not nest come back unchanged.

    Counted bins are [i, i+1)·2^e with one e per histogram, so the wider bins of one are unions of the narrower ones of the
    other, and adding neighbors up loses nothing.
    """
    widths = [equal_width(histogram.edges) for histogram in histograms]
    width = max((w for w in widths if w is not None), default=None)
    if width is None or not all(_nests(h.edges[0], w, width) for h, w in zip(histograms, widths, strict=True)):
        return list(histograms)
    low, high = min(h.edges[0] for h in histograms), max(h.edges[-1] for h in histograms)
    while math.ceil(high / width - 1e-6) - math.floor(low / width + 1e-6) > most:
        width *= 2
    first = math.floor(low / width + 1e-6)
    bins = max(math.ceil(high / width - 1e-6) - first, 1)
    edges = tuple((first + i) * width for i in range(bins + 1))
    regrouped = []
    for histogram in histograms:
        counts = [0] * bins
        for (left, right), count in zip(itertools.pairwise(histogram.edges), histogram.counts, strict=True):
            counts[math.floor((left + right) / 2 / width) - first] += count
        regrouped.append(dataclasses.replace(histogram, edges=edges, counts=tuple(counts)))
    return regrouped


def equal_width(edges: Sequence[float]) -> float | None:
    """The common width of the bins, or None if they differ."""
    widths = [right - left for left, right in itertools.pairwise(edges)]
    if not widths or min(widths) <= 0 or max(widths) > min(widths) * (1 + 1e-6):
        return None
    return (edges[-1] - edges[0]) / len(widths)


def _nests(start: float, narrow: float | None, wide: float) -> bool:
    """Whether bins of width `narrow` from `start` fill bins of width `wide` counted from 0, without a rest."""
    if narrow is None:
        return False
    return all(abs(ratio - round(ratio)) < 1e-6 * max(abs(ratio), 1) for ratio in (wide / narrow, start / narrow))


def spectrum_figures(report: AuditReport) -> list[Figure]:
    """Singular values of the head, and the share of its energy that the first of them gather; nothing for a head of zeros."""
    spectrum = report.figures.spectrum
    if spectrum is None or not any(sigma > 0 for sigma in spectrum.raw):
        return []
    raw, centered = report.heads.raw, report.heads.centered
    sigmas = {name: values for name, values in ((RAW, spectrum.raw), (CENTERED, spectrum.centered)) if values}
    shares = {name: _shares(sigmas[name], head.e_1) for name, head in zip(sigmas, (raw, centered), strict=False)}
    ranks, high = (0.9, max(map(len, sigmas.values())) * 1.1), fig.log_domain(*sigmas.values())
    method = "fp64, from the Gram matrix" if spectrum.method == "exact" else spectrum.method

    def drawn(
        key: str, title: str, label: str, columns: dict[str, tuple[float, ...]], domain: fig.Domain, caption: str
    ) -> Figure:
        log = key == "sigma"
        rows = [
            fig.curve(name, range(1, len(ys) + 1), ys, log_y=log, dash=name == CENTERED)
            for name, ys in columns.items()
            if ys
        ]
        axes = fig.axis(label, ranks, log=True), fig.axis_of(key, domain, log=log)
        layers = [fig.reference((LOW_RANK, LOW_RANK), domain), fig.lines(rows)]
        return fig.panel(
            key, title, axes, ((name, TONES[name]) for name in sigmas), layers, caption, of=key, height=240
        )

    first = f"{symbol('sigma_1')}: {pair(raw.sigma_1, centered.sigma_1)}. Method: {method}."
    gathered = f"{symbol('e_16')} (line): {pair(raw.e_16, centered.e_16)}."
    return [
        drawn("sigma", "Singular values of the head", "index i", sigmas, high, first),
        drawn("energy", "Energy in leading directions", "first i directions", shares, (0.0, 1.0), gathered),
    ]


def _shares(sigma: Sequence[float], first_share: float | None) -> tuple[float, ...]:
    """Running sums of σ² over ‖W‖² = σ_1²/E_1; nothing if a head of zeros has no E_1."""
    if not first_share:
        return ()
    total = sigma[0] * sigma[0] / first_share
    if not 0 < total < math.inf:  # σ² of a damaged file may be beyond the range of fp64
        return ()
    return tuple(min(part / total, 1.0) for part in itertools.accumulate(s * s for s in sigma))


def compared_figures(named: Sequence[tuple[str, AuditReport]]) -> list[Figure]:
    """One panel per headline quantity; a line per audit, raw and centered joined."""
    return [figure for key in HEADLINE[:4] if (figure := _dumbbells(named, key)) is not None]


def _dumbbells(named: Sequence[tuple[str, AuditReport]], key: str) -> Figure | None:
    # A centered |μ| is rounding noise; on a shared axis it would squeeze every raw value into a corner.
    heads = {"raw": RAW} if key == "mu_abs_99" else HEADS
    spots, joined = [], []
    for audit, report in named:
        values = {name: getattr(getattr(report.heads, head), key) for head, name in heads.items()}
        drawn = {name: value for name, value in values.items() if value and SMALLEST < value <= LARGEST}
        spots += [{"series": name, "tip": f"{audit}, {name}", "x": x, "y": audit} for name, x in drawn.items()]
        if len(drawn) == 2:
            joined.append({"x": drawn[RAW], "x2": drawn[CENTERED], "y": audit})
    if not spots:
        return None
    x = fig.axis_of(key, fig.log_domain([spot["x"] for spot in spots], margin=0.12), log=True)
    y = {"type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 130, "grid": True}}
    bars = fig.layer("rule", joined, {"x2": {"field": "x2"}, "color": {"value": STRONG}}, strokeWidth=3, tooltip=None)
    series = ((name, TONES[name]) for name in heads.values())
    layers = [bars, fig.dots(spots, size=110, opacity=1)]
    return fig.panel(key, NAMES[key], (x, y), series, layers, of=key, height=20 + 30 * len(named))
