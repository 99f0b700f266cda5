"""Several audits on one axis: raw and centered of each joined by a line."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.charts.audit import Figure
from zloss.report.charts.svg import Chart, Scale, log_scale
from zloss.report.text.symbols import svg_text
from zloss.results.audit import AuditReport
from zloss.results.quantities import BY_KEY

COMPARED = {
    "mu_abs_99": "Common shift of the raw head",
    "p_z_999": "Log-normalizer tail",
    "a_p_99": "Gain tail",
    "delta_u_99": "Hidden-source tail",
}
ROW = 30


def dumbbell_figures(named: Sequence[tuple[str, AuditReport]]) -> list[Figure]:
    """One panel per headline quantity; a row per audit, in the order given."""
    figures = (_dumbbell(named, key) for key in COMPARED)
    return [figure for figure in figures if figure is not None]


def _dumbbell(named: Sequence[tuple[str, AuditReport]], key: str) -> Figure | None:
    # A centered |μ| is rounding noise; on a shared axis it would squeeze every raw value into a corner.
    pairs = [
        (getattr(report.heads.raw, key), None if key == "mu_abs_99" else getattr(report.heads.centered, key))
        for _, report in named
    ]
    values = [value for pair in pairs for value in pair if value]
    if not values:
        return None
    label = BY_KEY[key]
    rows = len(named)
    chart = Chart(
        log_scale(values, margin=0.12),
        Scale(rows - 0.4, -0.6),
        label.symbol,
        "",
        f"compare-{key}",
        height=64 + ROW * rows,
        width=480,
        left=130,
        show_y_ticks=False,
    )
    for row, ((name, _), (raw, centered)) in enumerate(zip(named, pairs, strict=True)):
        if raw and centered:
            chart.line([raw, centered], [row, row], "joined")
        for css, value in (("raw", raw), ("centered", centered)):
            if value:
                chart.points([value], [row], f"{css} big", f"{name}, {css}")
        short = name if len(name) <= 18 else name[:17] + "…"
        chart.outside.append(
            f'<text class="tick" x="122" y="{chart.py(row) + 3.5:.1f}" text-anchor="end">{svg_text(short)}</text>'
        )
    return Figure(COMPARED[key], chart.render(), "")
