"""Does the Z push log Z away from its target?"""

from __future__ import annotations

from zloss.audit.loss.evidence import Evidence, found, no_z, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "negative_coefficient"


def check(evidence: Evidence) -> Finding:
    """The sign of λ."""
    identified = evidence.ident.identified
    if (why := no_z(evidence)) is not None:
        return not_applicable(ID, why)
    if identified.coef is None:
        return not_applicable(ID, "The penalty is not a known one, so its sign cannot be read.")
    if any(c.name.endswith("_not_squared") for c in evidence.ident.selection.fit.candidates):
        return not_applicable(ID, "The penalty is not squared: see not_squared.")
    if identified.coef < 0:
        return found(ID, f"λ = {identified.coef:.4g} is negative: log Z is driven away from c.", identified.coef)
    return passed(ID, "λ is positive.", identified.coef)
