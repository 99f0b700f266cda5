"""The numbers of a head, raw and centered, line by line."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.text.numbers import number
from zloss.results.audit import NOT_MEASURED, AuditReport
from zloss.results.quantities import HEAD, Definition


@dataclass(frozen=True)
class HeadLine:
    """A line of the full table of numbers."""

    label: Definition
    raw: float | None
    centered: float | None
    ratio: float | None
    note: str


def head_lines(report: AuditReport) -> list[HeadLine]:
    """Every number of both coordinates; `note` has the bounds of a sketched quantile and why a number is missing."""
    lines = []
    for label in HEAD:
        raw, centered = getattr(report.heads.raw, label.key), getattr(report.heads.centered, label.key)
        notes = []
        for coordinate, value in (("raw", raw), ("centered", centered)):
            path = f"heads.{coordinate}.{label.key}"
            bound = report.quantile_bounds.get(path)
            if bound is not None:
                notes.append(f"{coordinate} within {number(bound.lower)} … {number(bound.upper)}")
            if value is None:
                notes.append(f"{coordinate}: {why_missing(report, path)}")
        lines.append(
            HeadLine(label, raw, centered, centered / raw if raw and centered is not None else None, "; ".join(notes))
        )
    return lines


def why_missing(report: AuditReport, path: str) -> str:
    """Why the number at a dotted path is absent."""
    return report.reason(path) or NOT_MEASURED
