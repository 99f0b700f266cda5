"""Singular values of the head, and the share of its energy that the first of them gather."""

from __future__ import annotations

import itertools

from zloss.report.charts.panel import Axis, Layer, Mark, Panel, Series, Values, across
from zloss.report.charts.scale import Scale, log_scale
from zloss.report.text.numbers import pair
from zloss.results.audit import AuditReport
from zloss.results.quantities import symbol

LOW_RANK = 16.0
"""The rank of E_16, F_16 and ρ_16."""


def spectrum_panels(report: AuditReport) -> list[Panel]:
    """Two panels; none where the spectrum was not computed or the head is all zeros."""
    spectrum = report.figures.spectrum
    if spectrum is None or not any(sigma > 0 for sigma in spectrum.raw):
        return []
    found = [(name, values) for name, values in (("raw", spectrum.raw), ("centered", spectrum.centered)) if values]
    ranks = Scale(0.9, max(len(values) for _, values in found) * 1.1, log=True)
    raw, centered = report.heads.raw, report.heads.centered
    method = "fp64, from the Gram matrix" if spectrum.method == "exact" else spectrum.method
    values = Axis.of("sigma", log_scale(*(sigma for _, sigma in found)))
    energy = Axis.of("energy", Scale(0, 1))
    shares = [(name, _shares(sigma, getattr(report.heads, name).e_1)) for name, sigma in found]
    return [
        Panel(
            "sigma",
            "Singular values of the head",
            Axis("index i", ranks),
            values,
            (_border(values), *_curves(found)),
            f"{symbol('sigma_1')}: {pair(raw.sigma_1, centered.sigma_1)}. Method: {method}.",
            width=480,
        ),
        Panel(
            "energy",
            "Energy in leading directions",
            Axis("first i directions", ranks),
            energy,
            (_border(energy), *_curves(shares)),
            f"{symbol('e_16')} (line): {pair(raw.e_16, centered.e_16)}.",
            width=480,
        ),
    ]


def _border(y: Axis) -> Mark:
    return Mark("zero", (LOW_RANK, LOW_RANK), across(y))


def _curves(found: list[tuple[str, Values]]) -> list[Layer]:
    layers: list[Layer] = []
    for name, values in found:
        ranks = tuple(float(i + 1) for i in range(len(values)))
        layers += [Series("line", ranks, values, name, name), Series("points", ranks, values, name, name)]
    return layers


def _shares(sigma: Values, first_share: float | None) -> Values:
    """Running sums of σ² over ‖W‖² = σ_1²/E_1; nothing where a head of zeros has no E_1."""
    if not first_share:
        return ()
    total = sigma[0] ** 2 / first_share
    return tuple(min(part / total, 1.0) for part in itertools.accumulate(s * s for s in sigma))
