"""The cards of the page: headline quantities in both coordinates, with the arithmetic that templates must not do."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.tables.head import head_definition, why_missing
from zloss.results.audit import AuditReport
from zloss.results.quantities import BY_KEY, HEADLINE, Definition


@dataclass(frozen=True)
class Card:
    """One headline quantity in both coordinates; bars are percentages of the larger value."""

    label: Definition
    raw: float | None
    centered: float | None
    raw_bar: float
    centered_bar: float
    ratio: float | None
    missing: str
    """Why a number is absent."""

    @property
    def direction(self) -> str:
        """Whether centering lowers, raises or keeps the quantity; a change below 0.5 % keeps it."""
        if self.ratio is None or abs(self.ratio - 1) < 5e-3:
            return "same"
        return "down" if self.ratio < 1 else "up"


R_Z = BY_KEY["r_z"]


def cards(report: AuditReport) -> list[Card]:
    """The headline quantities, R_Z last."""
    heads, gradient = report.heads, report.gradient
    out = [
        _card(
            head_definition(key, report),
            getattr(heads.raw, key),
            getattr(heads.centered, key),
            why_missing(report, f"heads.centered.{key}"),
        )
        for key in HEADLINE
    ]
    raw, centered = (gradient.raw.r_z, gradient.centered.r_z) if gradient else (None, None)
    return [*out, _card(R_Z, raw, centered, why_missing(report, "gradient"))]


def _card(label: Definition, raw: float | None, centered: float | None, missing: str) -> Card:
    largest = max(abs(raw or 0.0), abs(centered or 0.0)) or 1.0
    ratio = centered / raw if raw and centered is not None else None
    return Card(label, raw, centered, 100 * abs(raw or 0) / largest, 100 * abs(centered or 0) / largest, ratio, missing)
