"""Compare an audit with the answer it owes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.audit.loss.zoo import Answer
from zloss.results.loss_audit import LossAudit

BESIDES = {"all_ignored_nonfinite", "reported_z_dtype"}
"""Warnings that a loss with the right objective can earn: about a batch without valid tokens, and about what is reported."""


def wrong_with(audit: LossAudit, answer: Answer) -> list[str]:
    """Every way in which the audit differs from the answer, in words."""
    got, wrong = audit.identified, []
    if got.has_z is not answer.has_z:
        wrong.append(f"has_z is {got.has_z}, not {answer.has_z} ({got.reason})")
    named = {finding.id for finding in audit.found}
    errors = {finding.id for finding in audit.errors}
    if not answer.ids <= named:
        wrong.append(f"missed {set(answer.ids - named)}")
    if not errors <= answer.ids:
        wrong.append(f"errors {errors - answer.ids}")
    warnings = {finding.id for finding in audit.found if finding.severity == "warning"} - BESIDES
    if warnings and not answer.ids and answer.has_z is got.has_z is not None:
        wrong.append(f"warnings {warnings}")
    wanted: dict[str, Any] = dict(answer.more)
    if not answer.ids and answer.has_z:
        wanted = {"coef": answer.coef, "coordinate": answer.coordinate, **wanted}
        if answer.target is not None:
            wanted["target"] = answer.target
    if answer.has_z is None and not (got.coef is got.target is got.coordinate is None and got.reason):
        wrong.append("an open answer has figures, or no reason")
    for key, value in wanted.items():
        found = getattr(got, key)
        close = isinstance(value, (float, dict)) and found is not None
        # λ is small: what counts is its relative error, within what the audit states and below 1 %.
        slack = min(got.uncertainty.coef or 0.0, 1e-2 * abs(value)) if key == "coef" and close else 1e-5
        if not (found == pytest.approx(value, rel=1e-5, abs=slack) if close else found == value):
            wrong.append(f"{key} is {found}, not {value}")
    text = " ".join([got.penalty, got.reason or "", *(finding.sentence for finding in audit.findings)])
    if answer.words not in text:
        wrong.append(f"does not say {answer.words!r}")
    if "miscounted" in text and "size_dependent" not in answer.ids:
        wrong.append("speaks of a tail")
    return wrong
