"""What the page shows of the audit of a loss."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.tables.plain import Lines, flat_lines
from zloss.report.text.loss_answer import bottom_line, headline, severity, what_to_do
from zloss.results.loss_audit import Finding, LossAudit


@dataclass(frozen=True)
class LossAuditView:
    """What the template shows of an audit of a loss."""

    name: str
    answer: list[str]
    """What the loss applies, and how many findings there are."""
    remedy: str
    """What to do about them; empty where there are none."""
    findings: list[Finding]
    blocks: list[tuple[str, Lines]]
    """(title, lines) of every section."""


def loss_audit_view(audit: LossAudit) -> LossAuditView:
    """The view of one audit: errors, warnings and notes first, then passes, then what was not asked."""
    order = ("error", "warning", "note", "pass", "not_applicable")
    plain = audit.to_dict()
    titles = {
        "identified": "Identified",
        "source": "Source against fp64",
        "target_model": "Source on the model's own logits",
        "provenance": "Provenance",
    }
    blocks = [(title, flat_lines(plain[key])) for key, title in titles.items() if plain[key] is not None]
    rest = flat_lines(plain, skip=("schema", "findings", *titles))
    return LossAuditView(
        name=str(audit.provenance.get("loss", "loss")),
        answer=[headline(audit), bottom_line(audit)[0]],
        remedy=what_to_do(audit),
        findings=sorted(audit.findings, key=lambda finding: order.index(severity(finding))),
        blocks=[*blocks, *([("Further", rest)] if rest else [])],
    )
