"""Rows and cards of the page, computed from a report so that the templates hold no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zloss.report.formatting import MISSING, coefficient, number
from zloss.results.audit import NOT_MEASURED, AuditReport, Decision, Effect
from zloss.results.quantities import BY_KEY, HEAD, HEADLINE, Definition


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
        """Whether centering lowers, raises or keeps it; judged on what four digits show."""
        if self.ratio is None or abs(self.ratio - 1) < 5e-3:
            return "same"
        return "down" if self.ratio < 1 else "up"


def cards(report: AuditReport) -> list[Card]:
    """The headline quantities, R_Z last."""
    heads, gradient = report.heads, report.gradient
    out = [
        _card(BY_KEY[key], getattr(heads.raw, key), getattr(heads.centered, key), _why(report, f"heads.centered.{key}"))
        for key in HEADLINE
    ]
    raw, centered = (gradient.raw.r_z, gradient.centered.r_z) if gradient else (None, None)
    return [*out, _card(BY_KEY["r_z"], raw, centered, _why(report, "gradient"))]


def _card(label: Definition, raw: float | None, centered: float | None, missing: str) -> Card:
    largest = max(abs(raw or 0.0), abs(centered or 0.0)) or 1.0
    ratio = centered / raw if raw and centered is not None else None
    return Card(label, raw, centered, 100 * abs(raw or 0) / largest, 100 * abs(centered or 0) / largest, ratio, missing)


def _why(report: AuditReport, path: str) -> str:
    return report.reason(path) or NOT_MEASURED


@dataclass(frozen=True)
class HeadRow:
    """A line of the full table of numbers."""

    label: Definition
    raw: float | None
    centered: float | None
    ratio: float | None
    note: str


def head_rows(report: AuditReport) -> list[HeadRow]:
    """Every number of both heads; bounds of sketched quantiles and reasons of missing numbers stand beside them."""
    rows = []
    for label in HEAD:
        raw, centered = getattr(report.heads.raw, label.key), getattr(report.heads.centered, label.key)
        notes = []
        for coordinate, value in (("raw", raw), ("centered", centered)):
            path = f"heads.{coordinate}.{label.key}"
            bound = report.quantile_bounds.get(path)
            if bound is not None:
                notes.append(f"{coordinate} within {number(bound.lower)} … {number(bound.upper)}")
            if value is None:
                notes.append(f"{coordinate}: {_why(report, path)}")
        rows.append(
            HeadRow(label, raw, centered, centered / raw if raw and centered is not None else None, "; ".join(notes))
        )
    return rows


def status(decision: Decision) -> str:
    """CSS class and word of a verdict."""
    return {True: "fired", False: "quiet", None: "open"}[decision.fired]


def effect_number(effect: Effect, value: float | None) -> str:
    """A number of an effect; coefficients are written as coefficients."""
    return coefficient(value) if effect.unit == "λ" else number(value)


_CONTROL = {code: 0x2400 + code for code in range(32)} | {0x7F: "␡", ord("\n"): "⏎", ord("\t"): "⇥"}


def visible_text(text: str) -> str:
    """Text of tokens with line breaks, tabs and control characters made visible."""
    return text.translate(_CONTROL)


def flat_rows(data: dict[str, Any], *, skip: tuple[str, ...] = (), prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as (dotted key, text); `extra` keys stand beside the named ones."""
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if key in skip:
            continue
        name = prefix if key == "extra" else f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            rows += flat_rows(value, prefix=name)
        elif isinstance(value, (list, tuple)) and any(isinstance(item, dict) for item in value):
            for i, item in enumerate(value):
                rows += (
                    flat_rows(item, prefix=f"{name}.{i}") if isinstance(item, dict) else [(f"{name}.{i}", show(item))]
                )
        else:
            rows.append((name, show(value)))
    return rows


def show(value: Any) -> str:
    """A value of unknown type as text."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return number(value, 6)
    if isinstance(value, (list, tuple)):
        return ", ".join(show(item) for item in value)
    return str(value)
