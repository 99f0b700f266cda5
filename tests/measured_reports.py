"""Reports with real numbers, made once per session."""

from __future__ import annotations

import pytest
import torch

from tests import straight_audit
from zloss.decide.decision_map import with_decisions
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.loss_audit import LossAudit

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bare() -> AuditReport:
    """A complete report without decisions."""
    return AuditReport.from_dict(straight_audit.tiny_report())


@pytest.fixture(scope="session")
def report(bare: AuditReport) -> AuditReport:
    return with_decisions(bare)


@pytest.fixture(scope="session")
def other() -> AuditReport:
    """A second model whose rows share a far smaller mean."""
    return with_decisions(AuditReport.from_dict(straight_audit.tiny_report(5, name="tiny <other>", shift=0.02)))


@pytest.fixture(scope="session")
def loss_audit() -> LossAudit:
    tokens, _, _ = straight_audit.run_tiny(straight_audit.tiny_model())
    return LossAudit.from_dict(straight_audit.loss_audit(tokens, torch.bfloat16))


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    return Comparison.from_dict(straight_audit.comparison({"ce": 0.0, "standard": 1e-2, "heavy": 1.0}))
