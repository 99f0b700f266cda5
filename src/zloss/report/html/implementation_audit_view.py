"""What the page shows of an implementation audit."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.tables.implementation_audit import TitledTable, implementation_tables
from zloss.report.tables.plain import Lines, flat_lines
from zloss.report.text import numbers
from zloss.results.implementation_audit import ImplementationAudit


@dataclass(frozen=True)
class ImplementationAuditView:
    """What the template shows of an audit of the implementation."""

    lead: str
    """Model, text and setting in one sentence."""
    sections: tuple[TitledTable, ...]
    notes: tuple[str, ...]
    blocks: list[tuple[str, Lines]]
    """(title, lines) of model, text and provenance."""


def implementation_audit_view(audit: ImplementationAudit) -> ImplementationAuditView:
    """The view of one audit."""
    status = " It was interrupted." if audit.status == "partial" else ""
    stars = any(line.interpreted for line in audit.implementations)
    starred = ("* on Triton's interpreter, which cuts bf16 off where a GPU rounds",) if stars else ()
    plain = audit.to_dict()
    titles = {"model": "Model", "corpus": "Text", "provenance": "Provenance", "timings": "Seconds"}
    return ImplementationAuditView(
        lead=f"{audit.model.name} on {numbers.number(audit.corpus.predictions)} tokens of {audit.corpus.name}, "
        f"λ {audit.coef:g}, c {numbers.number(audit.target)}.{status}",
        sections=implementation_tables(audit),
        notes=starred + audit.notes,
        blocks=[(title, flat_lines(plain[key])) for key, title in titles.items()],
    )
