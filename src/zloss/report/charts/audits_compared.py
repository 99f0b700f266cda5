"""Several audits on one axis: raw and centered of each joined by a line."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.charts.panel import Axis, Layer, Mark, Panel, Series
from zloss.report.charts.scale import Scale, log_scale
from zloss.results.audit import AuditReport

COMPARED = {
    "mu_abs_99": "Common shift of the raw head",
    "p_z_999": "Log-normalizer tail",
    "a_p_99": "Gain tail",
    "delta_u_99": "Hidden-source tail",
}
LINE = 30
"""Height of one audit's line."""
LONGEST = 18
"""Letters of a name on the axis; tooltips have the whole name."""


def compared_panels(named: Sequence[tuple[str, AuditReport]]) -> list[Panel]:
    """One panel per headline quantity; a line per audit, in the order given."""
    panels = (_dumbbells(named, key) for key in COMPARED)
    return [panel for panel in panels if panel is not None]


def _dumbbells(named: Sequence[tuple[str, AuditReport]], key: str) -> Panel | None:
    # A centered |μ| is rounding noise; on a shared axis it would squeeze every raw value into a corner.
    pairs = [
        (getattr(report.heads.raw, key), None if key == "mu_abs_99" else getattr(report.heads.centered, key))
        for _, report in named
    ]
    values = [value for pair in pairs for value in pair if value]
    if not values:
        return None
    lines = len(named)
    layers: list[Layer] = []
    for line, ((name, _), (raw, centered)) in enumerate(zip(named, pairs, strict=True)):
        if raw and centered:
            layers.append(Mark("joined", (raw, centered), (line, line)))
        layers += [
            Series("spots", (value,), (float(line),), tone, tone, f"{name}, {tone}")
            for tone, value in (("raw", raw), ("centered", centered))
            if value
        ]
    names = tuple(name if len(name) <= LONGEST else name[: LONGEST - 1] + "…" for name, _ in named)
    # The first audit stands at the top: the scale runs downwards.
    y = Axis("", Scale(lines - 0.4, -0.6), names=names)
    x = Axis.of(key, log_scale(values, margin=0.12))
    return Panel(key, COMPARED[key], x, y, tuple(layers), width=480, height=64 + LINE * lines)
