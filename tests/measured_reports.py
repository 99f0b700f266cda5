"""Reports with real numbers, made once per session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import straight_audit
from zloss.decide.decision_map import with_decisions
from zloss.results.audit import AuditReport, LogitNoise, NoiseNumbers, PlannedLoss
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


def weighed(
    report: AuditReport,
    *,
    noise: tuple[float | None, float | None] = (0.002, 0.001),
    gain: float = 0.01,
    input_path: float | None = 0.01,
    r_z: float = 0.02,
    tokens: int = 8192,
    **planned: Any,
) -> AuditReport:
    """The report with measurements for its consequences: harmless ones unless others are given."""
    numbers = NoiseNumbers(*noise)
    measured = {"target": report.target, "delta_u_99": gain, "delta_u_ce_99": 1.0, "input_path": input_path}
    measured |= {"r_z": r_z, "r_z_model": r_z, "tokens": 2048}
    return replace(
        report,
        corpus=replace(report.corpus, predictions=tokens),
        logit_noise=LogitNoise(tokens=2048, saved_dtype="bfloat16", bf16=numbers, fp16=numbers),
        planned=PlannedLoss(**(measured | planned)),
    )


def with_fired(report: AuditReport, *fired: str, **changes: Any) -> AuditReport:
    """The report with exactly these stages fired; the stages of training are not evaluated."""
    decisions = tuple(
        replace(
            decision, fired=decision.stage in fired if decision.fired is not None or decision.stage in fired else None
        )
        for decision in report.decisions
    )
    return replace(report, decisions=decisions, **changes)


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
