"""Is row t trained on its own target?"""

from __future__ import annotations

from zloss.audit.loss.evidence import CANNOT_TELL, Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "targets_moved"


def check(evidence: Evidence) -> Finding:
    """Labels shifted inside are usual in models; rolled ones train the last row on the first target."""
    how = evidence.box.targets
    if how == "rolled":
        return found(
            ID,
            "Targets look rolled by one: row t is trained on target t + 1 and the last row on target 0. All else was "
            "audited with the targets rolled back.",
        )
    if how == "shifted":
        return passed(
            ID,
            "Targets look shifted by one: row t is trained on target t + 1 inside the loss, the last row on none. All "
            "else was audited with the targets moved accordingly.",
        )
    if not evidence.ident.told:
        return not_applicable(ID, CANNOT_TELL)
    if evidence.ident.identified.ce_denominator == "none":
        return not_applicable(ID, "There is no cross-entropy, so rows are not trained on targets.")
    return passed(ID, "Each row is trained on its own target.")
