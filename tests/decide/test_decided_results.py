"""Results decided together."""

from __future__ import annotations

import pytest

from zloss.decide.decided_results import DecidedResults, decide_results
from zloss.decide.decision_map import decide
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.loss_audit import LossAudit


def test_every_audit_has_its_own_map(
    report: AuditReport, other: AuditReport, loss_audit: LossAudit, comparison: Comparison
) -> None:
    results = decide_results((report, other), (loss_audit,), (comparison,))
    assert results.shared is None
    assert [one.audit for one in results.maps] == ["tiny-tied", "tiny <other>"]
    for audit, one in zip((report, other), results.maps, strict=True):
        assert one.decisions == decide(audit, loss_audits=[loss_audit], comparisons=[comparison])
        assert one.thresholds == Thresholds().to_dict()


def test_without_an_audit_there_is_one_map(comparison: Comparison) -> None:
    chosen = Thresholds(grad_tail_ratio=1e9)
    (only,) = decide_results(comparisons=(comparison,), thresholds=chosen).maps
    assert only.audit is None
    assert only.thresholds == chosen.to_dict()
    assert only.decisions == decide(None, comparisons=[comparison], thresholds=chosen)


def test_an_undecided_audit_is_refused(bare: AuditReport) -> None:
    with pytest.raises(InputError, match="call `decide_results`"):
        DecidedResults(audits=(bare,))
