"""The numbers of a head, raw and centered, line by line."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zloss.report.text.numbers import number
from zloss.results.audit import NOT_MEASURED, AuditReport
from zloss.results.quantities import BY_KEY, HEAD, Definition


@dataclass(frozen=True)
class HeadLine:
    """A line of the full table of numbers."""

    label: Definition
    raw: float | None
    centered: float | None
    ratio: float | None
    note: str


CAPPED = {
    "a_p_99": "p99 output-to-hidden gain through the softcap, ‖WᵀCp‖/‖p‖ with C = diag(1 − tanh²(z/cap))",
    "a_p_mean": "mean output-to-hidden gain through the softcap",
    "delta_u_99": "tail of the source that reaches the hidden state through the softcap, per token at λ_diag",
}
"""Quantities that mean something else where the logits are capped."""


def head_definition(key: str, report: AuditReport) -> Definition:
    """How a number of the head is written for this model; under a softcap the gain is another one."""
    found = BY_KEY[key]
    if report.model.softcap is None or key not in CAPPED:
        return found
    return replace(found, symbol=f"{found.symbol}, capped", meaning=CAPPED[key])


def head_lines(report: AuditReport) -> list[HeadLine]:
    """Every number of both coordinates; `note` has the bounds of a sketched quantile and why a number is missing."""
    lines = []
    for label in (head_definition(quantity.key, report) for quantity in HEAD):
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
