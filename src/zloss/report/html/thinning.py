"""Fewer tokens in the scatter panels, so that many audits fit one page."""

from __future__ import annotations

import dataclasses
from typing import Any

from zloss.results.audit import AuditReport
from zloss.results.figure_data import GeometrySample


def thin(report: AuditReport, share: float) -> AuditReport:
    """Keep about `share` of the sampled tokens: the one per cent with the largest ‖δ_u‖ first, then evenly spaced ones."""
    sample = report.figures.geometry
    if share >= 1 or sample is None:
        return report
    figures = dataclasses.replace(report.figures, geometry=_thin_sample(sample, share))
    return dataclasses.replace(report, figures=figures)


def _thin_sample(sample: GeometrySample, share: float) -> GeometrySample:
    size = len(sample)
    wanted = int(size * share)
    strength = [
        max(pair) for pair in zip(sample.delta_u_raw, sample.delta_u_centered or sample.delta_u_raw, strict=True)
    ]
    order = sorted(range(len(strength)), key=lambda i: -strength[i])
    keep = set(order[: min(wanted, size // 100)])
    keep.update(i * size // max(wanted, 1) for i in range(wanted))
    indices = sorted(keep)
    columns: dict[str, Any] = {
        field.name: tuple(column[i] for i in indices)
        for field in dataclasses.fields(sample)
        if isinstance(column := getattr(sample, field.name), tuple) and len(column) == size
    }
    return dataclasses.replace(sample, **columns)
