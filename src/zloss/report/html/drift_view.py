"""What the page shows of the drift over a run."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.decide.drift.limits import DriftLimits
from zloss.report.charts.drift import drift_panels
from zloss.report.charts.svg import Drawing, drawings
from zloss.report.tables.drift import STATES, DriftLine, drift_lines, drift_titles, movement_name
from zloss.report.tables.plain import Lines, flat_lines
from zloss.report.text import numbers
from zloss.results.drift import Drift, Movement
from zloss.results.record import to_plain


@dataclass(frozen=True)
class DriftView:
    """What the template shows of the drift over a run."""

    drift: Drift
    rule: str
    figures: list[Drawing]
    movements: list[tuple[str, str, Movement]]
    """(name, verdict in words, movement)."""
    titles: list[str]
    lines: list[DriftLine]
    limits: Lines
    provenance: Lines


def drift_view(drift: Drift, key: str) -> DriftView:
    """The view of one record; `key` is the prefix of its element ids."""
    tolerance = drift.limits.get("ppl_tolerance", DriftLimits.ppl_tolerance)
    return DriftView(
        drift=drift,
        rule="A number moved where its change, less the noise of the text, exceeds the limits below. CE stood still where the "
        f"95 % interval of its paired change lies within {numbers.number(100 * tolerance)} % of PPL.",
        figures=drawings(drift_panels(drift), key),
        movements=[(movement_name(movement), STATES[movement.state], movement) for movement in drift.movements],
        titles=drift_titles(),
        lines=drift_lines(drift),
        limits=flat_lines(drift.limits),
        provenance=flat_lines(to_plain(drift.provenance)),
    )
