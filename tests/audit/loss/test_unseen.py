"""Losses written without looking at the audit: no false sentence on forty of them, no accusation of two hundred correct ones."""

from __future__ import annotations

import pytest

from tests.audit.loss.correct import correct_losses
from tests.audit.loss.further import judge
from tests.audit.loss.unseen import UNSEEN
from zloss.audit.loss.run import audit_loss

CORRECT = {name: (loss, truth) for name, loss, _, truth in correct_losses()}


@pytest.mark.parametrize("name", UNSEEN)
def test_an_unseen_loss_gets_no_false_sentence(name: str) -> None:
    case = UNSEEN[name]
    verdict, reasons = judge(audit_loss(case.loss, **case.options), case)
    assert verdict in ("right", "open"), reasons


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_loss_has_no_error_and_no_warning(name: str) -> None:
    loss, truth = CORRECT[name]
    audit = audit_loss(loss, **truth.options)
    assert [one.sentence for one in audit.found if one.severity != "note" and one.id not in truth.may] == []
    assert judge(audit, truth)[0] in ("right", "open")
