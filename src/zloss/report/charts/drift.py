"""Curves of the watched numbers over the steps of a run, raw and centered; a dashed line where drift is first seen."""

from __future__ import annotations

from zloss.decide.drift.watched import SHIFT_KEYS
from zloss.report.charts.panel import Axis, Layer, Mark, Panel, Series, across, colour_of
from zloss.report.charts.scale import linear_scale
from zloss.report.text.numbers import number
from zloss.results.coordinate import Coordinate
from zloss.results.drift import Drift

SOURCE = {
    "ppl": "Perplexity",
    "mu_abs_99": "Common shift, tail",
    "mu_rms": "Common shift, root mean square",
    "p_z_999": "Log-normalizer tail",
}
TRANSPORT = {
    "a_p_99": "Gain tail",
    "sigma_1": "Spectral norm of the head",
    "e_1": "Energy of the first direction",
    "r_z": "Z gradient over CE gradient",
}
"""Quantity → title; the two rows of the figure."""
COORDINATES: tuple[Coordinate, ...] = ("raw", "centered")


def drift_panels(drift: Drift) -> list[Panel]:
    """Every panel that the record has data for."""
    return [*source_panels(drift), *transport_panels(drift)]


def source_panels(drift: Drift) -> list[Panel]:
    """PPL, p99 |μ|, rms μ and P_Z."""
    return [panel for key, title in SOURCE.items() if (panel := _panel(drift, key, title)) is not None]


def transport_panels(drift: Drift) -> list[Panel]:
    """A_p, σ_1, E_1 and R_Z."""
    return [panel for key, title in TRANSPORT.items() if (panel := _panel(drift, key, title)) is not None]


def _panel(drift: Drift, key: str, title: str) -> Panel | None:
    curves = _curves(drift, key)
    if not curves:
        return None
    x = Axis("step", linear_scale([float(each.step) for each in drift.checkpoints]))
    y = Axis.of(key, linear_scale(*(curve.ys for curve in curves), _tolerance_band(drift, key, curves), margin=0.08))
    layers: list[Layer] = []
    captions = []
    for movement in drift.invisible:
        if movement.quantity == key and movement.began is not None:
            layers.append(Mark("quantile", (float(movement.began),) * 2, across(y), movement.coordinate))
            captions.append(
                f"{movement.coordinate.capitalize()}: {number(movement.before)} → {number(movement.after)} while CE stood "
                f"still, first seen at step {movement.began}."
            )
    for curve in curves:
        layers += [curve, Series("spots", curve.xs, curve.ys, curve.name, curve.tone)]
    return Panel(key, title, x, y, tuple(layers), " ".join(captions))


def _tolerance_band(drift: Drift, key: str, curves: list[Series]) -> list[float]:
    """PPL within its tolerance must look still: the axis spans at least the tolerance on both sides."""
    if key != "ppl":
        return []
    share = drift.limits.get("ppl_tolerance", 0.0)
    values = [value for curve in curves for value in curve.ys]
    return [min(values) * (1 - share), max(values) * (1 + share)]


def _curves(drift: Drift, key: str) -> list[Series]:
    """One line per coordinate; values that do not exist are left out."""
    if key == "ppl":
        found = [("PPL", colour_of(0), [each.ppl for each in drift.checkpoints])]
    else:
        found = [
            (coordinate, coordinate, [getattr(getattr(each, coordinate), key) for each in drift.checkpoints])
            for coordinate in COORDINATES
            if not (coordinate == "centered" and key in SHIFT_KEYS)
        ]
    curves = []
    for name, tone, values in found:
        pairs = [
            (float(each.step), value)
            for each, value in zip(drift.checkpoints, values, strict=True)
            if value is not None
        ]
        if pairs:
            curves.append(Series("line", tuple(x for x, _ in pairs), tuple(y for _, y in pairs), name, tone))
    return curves
