"""Does the Z push log Z away from its target?"""

from __future__ import annotations

from zloss.audit.loss.evidence import NO_Z, Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "negative_coefficient"


def check(evidence: Evidence) -> Finding:
    """The sign of λ."""
    identified = evidence.ident.identified
    if not identified.has_z or identified.coef is None:
        return not_applicable(ID, NO_Z)
    if evidence.ident.selection.how == "unexplained":
        return not_applicable(ID, "The penalty is not a known one; its sign means nothing.")
    if identified.coef < 0:
        return found(ID, f"λ = {identified.coef:.4g} is negative: log Z is driven away from c.", identified.coef)
    return passed(ID, "λ is positive.", identified.coef)
