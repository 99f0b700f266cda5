"""The three panels of paper fig:gradient_geometry: translation by −w̄, rank-16 part of the gain, source at logits and hidden."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean

from zloss.report.charts.panel import Axis, Layer, Mark, Note, Panel, Series, across
from zloss.report.charts.scale import LARGEST, SMALLEST, Scale, linear_scale, log_scale
from zloss.report.text.numbers import both, coefficient, number
from zloss.results.audit import AuditReport
from zloss.results.figure_data import GeometrySample
from zloss.results.quantities import symbol

RAYS = (0.3, 1, 2, 5, 10, 20, 50, 100, 300, 1000)


def geometry_panels(report: AuditReport) -> list[Panel]:
    """The panels that the report has data for."""
    sample = report.figures.geometry
    if sample is None:
        return []
    panels = (_plane(sample), _low_rank(report, sample), _transport(report, sample))
    return [panel for panel in panels if panel is not None]


def _clouds(raw: tuple[Sequence[float], ...], centered: tuple[Sequence[float], ...]) -> list[Layer]:
    """The tokens in both coordinates."""
    pairs = (("raw", raw), ("centered", centered))
    return [Series("cloud", tuple(xs), tuple(ys), name, name) for name, (xs, ys) in pairs]


def _plane(sample: GeometrySample) -> Panel | None:
    """Panel a: Wᵀp of every token, raw and centered, on the plane of w̄ and the leading residual direction."""
    if not sample.x_raw or not sample.x_centered:
        return None
    x = Axis("along w̄/‖w̄‖", linear_scale(sample.x_raw, sample.x_centered, [0.0]))
    y = Axis("along the leading residual direction", linear_scale(sample.y_raw, sample.y_centered))
    tail, head = fmean(sample.x_raw), fmean(sample.x_centered)
    span = y.scale.high - y.scale.low
    height = y.scale.high - 0.07 * span
    layers: list[Layer] = [
        Mark("zero", (0.0, 0.0), across(y)),
        *_clouds((sample.x_raw, sample.y_raw), (sample.x_centered, sample.y_centered)),
        Mark("arrow", (tail, head), (height, height)),
        Note("note", (tail + head) / 2, height - 0.055 * span, "−w̄"),
    ]
    length = f", of length {number(sample.mean_row_norm)}," if sample.mean_row_norm is not None else ""
    caption = f"Each dot is one token's Wᵀp. Centering moves all of them by the same vector −w̄{length} and changes no softmax."
    return Panel("plane", "a · One translation for every token", x, y, tuple(layers), caption)


def _low_rank(report: AuditReport, sample: GeometrySample) -> Panel | None:
    """Panel b: the part of a² inside the first 16 singular directions against a² itself."""
    if not any(a2 > 0 for a2 in sample.a2_raw) or not sample.rank16_raw:
        return None
    x = Axis.of("a2", log_scale(sample.a2_raw, sample.a2_centered), "exact a²")
    part = (sample.rank16_raw, sample.rank16_centered)
    y = Axis.of("rank16", log_scale(sample.a2_raw, sample.a2_centered, _above_share(part, 1e-3)))
    layers = [
        *_clouds((sample.a2_raw, sample.rank16_raw), (sample.a2_centered, sample.rank16_centered)),
        Mark("diagonal", across(x), across(x)),
    ]
    raw, centered = report.heads.raw, report.heads.centered
    caption = "On the diagonal a token's gain lies wholly in 16 directions of the head."
    caption += both(f" Correlation {symbol('rho_16')}: ", raw.rho_16, centered.rho_16)
    caption += both(f" Mean share {symbol('f_16')}: ", raw.f_16, centered.f_16)
    return Panel("rank16", "b · The rank-16 part of the gain", x, y, tuple(layers), caption)


def _transport(report: AuditReport, sample: GeometrySample) -> Panel | None:
    """Panel c: ‖δ_u‖ against ‖δ_z‖; rays are constant gains."""
    if not sample.delta_z_raw:
        return None
    zs, us = (sample.delta_z_raw, sample.delta_z_centered), (sample.delta_u_raw, sample.delta_u_centered)
    right, top = _beyond(zs), _beyond(us)
    x = Axis.of("logit_source", Scale(0, right), f"source at the logits {symbol('logit_source')}")
    y = Axis.of("delta_u", Scale(0, top), f"source at the hidden state {symbol('delta_u')}")
    rays: list[Layer] = []
    labels: list[Layer] = []
    for gain in _reached_gains(zs, us):
        end, at = min(right, top / gain), min(0.96 * right, 0.95 * top / gain)
        rays.append(Mark("ray", (0.0, end), (0.0, gain * end)))
        labels.append(Note("ray-label", at, gain * at, f"{gain:g}"))
    layers = [*rays, *_clouds((zs[0], us[0]), (zs[1], us[1])), *labels]
    caption = (
        f"Slope is the gain A_p; rays mark constant gains. {symbol('diag_coef')} = {coefficient(report.diag_coef)}."
    )
    caption += both(f" {symbol('a_p_99')}: ", report.heads.raw.a_p_99, report.heads.centered.a_p_99)
    return Panel("rays", "c · From logits to hidden state", x, y, tuple(layers), caption)


def _beyond(samples: tuple[Sequence[float], ...]) -> float:
    """A little above the largest value; 1 where a head of zeros has no source at all."""
    largest = max(itertools.chain(*samples), default=0.0)
    return min(largest, LARGEST) * 1.05 if largest > SMALLEST else 1.0


def _reached_gains(zs: tuple[Sequence[float], ...], us: tuple[Sequence[float], ...]) -> list[float]:
    """Round gains that the tokens really reach; none where every source is zero."""
    gains = [u / z for z, u in zip(itertools.chain(*zs), itertools.chain(*us), strict=True) if z > 0]
    if not gains:
        return []
    low, high = min(gains), max(gains)
    return [ray for ray in RAYS if low * 0.7 <= ray <= high * 1.3]


def _above_share(samples: tuple[Sequence[float], ...], share: float) -> list[float]:
    """Values above a small share of the largest: one token with a vanishing rank-16 part must not stretch the axis."""
    values = list(itertools.chain(*samples))
    floor = share * max(values, default=0.0)
    return [value for value in values if value > floor]
