"""Is log Z taken after subtracting the row maximum, and never restored?"""

from __future__ import annotations

from zloss.audit.loss.evidence import NO_Z, Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "max_shifted"


def check(evidence: Evidence) -> Finding:
    """The identified penalty says; a max-shifted one cannot see a common shift."""
    ident = evidence.ident
    if not ident.identified.has_z:
        return not_applicable(ID, NO_Z)
    if ident.identified.coordinate == "max_shifted":
        return found(
            ID,
            f"The penalised quantity is {ident.identified.penalty}: it is blind to a common shift of the logits, "
            "which is what Z-loss is there to hold. Add the row maximum back.",
            0.0,
        )
    return passed(ID, "The row maximum is not left out of log Z.")
