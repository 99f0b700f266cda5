"""Compare an audit with the answer it owes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.audit.loss.zoo import Answer
from zloss.results.loss_audit import LossAudit


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
        if not (found == pytest.approx(value, rel=1e-5, abs=1e-5) if close else found == value):
            wrong.append(f"{key} is {found}, not {value}")
    text = " ".join([got.penalty, got.reason or "", *(finding.sentence for finding in audit.findings)])
    if answer.words not in text:
        wrong.append(f"does not say {answer.words!r}")
    if "miscounted" in text and "size_dependent" not in answer.ids:
        wrong.append("speaks of a tail")
    return wrong
