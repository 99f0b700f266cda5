"""Which of the joined results is of which model, where they do not all name the same one.

One decision map is filled from all of them. A stage of a comparison then says nothing about another model that was audited.
"""

from __future__ import annotations

from collections.abc import Sequence

from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.loss_audit import LossAudit


def joined_models(
    audit: AuditReport | None,
    loss_audits: Sequence[LossAudit] = (),
    implementation_audits: Sequence[ImplementationAudit] = (),
    comparisons: Sequence[Comparison] = (),
) -> str | None:
    """One sentence that names the model of every result that records one; None where it is one model."""
    targets = [one.target_model for one in loss_audits]
    named: dict[str, list[str]] = {
        "audit": [] if audit is None else [audit.model.name],
        "loss audit": [target.model for target in targets if target is not None],
        "implementation audit": [one.model.name for one in implementation_audits],
        "comparison": [one.model for one in comparisons if one.model is not None],
    }
    if len({model for models in named.values() for model in models}) < 2:
        return None
    parts = []
    for kind, models in named.items():
        if models:
            several = f"the {kind}s are" if len(models) > 1 else f"the {kind} is"
            parts.append(f"{several} of {' and '.join(dict.fromkeys(models))}")
    return f"The joined results are of different models: {', '.join(parts)}."
