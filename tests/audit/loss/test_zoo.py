"""Every loss of the zoo gets the answer it owes: exact, open with a reason, or a finding by name."""

from __future__ import annotations

import json

import pytest

from tests.audit.loss.zoo import ZOO, Answer, exact
from tests.audit.loss.zoo_check import wrong_with
from zloss.audit.loss.run import audit_loss
from zloss.results.loss_audit import LossAudit


@pytest.mark.parametrize("name", ZOO)
def test_the_answer_is_right_or_honestly_open(name: str) -> None:
    loss, options, answer = ZOO[name]
    audit = audit_loss(loss, **options)
    assert wrong_with(audit, answer) == []
    plain = audit.to_dict()
    json.dumps(plain, allow_nan=False)
    assert LossAudit.from_dict(plain).to_dict() == plain


def test_the_comparison_of_the_zoo_can_fail() -> None:
    loss, options, _ = ZOO["class weights"]
    audit = audit_loss(loss, **options)
    assert wrong_with(audit, Answer(False))
    assert wrong_with(audit, exact(coef=1.01e-3))
    assert wrong_with(audit, exact(target=0.01))
    assert wrong_with(audit, Answer(None))
