"""Is log Z taken after subtracting the row maximum, and never restored?"""

from __future__ import annotations

from zloss.audit.loss.evidence import Evidence, found, no_known_z, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "max_shifted"


def check(evidence: Evidence) -> Finding:
    """Read from the coordinate of the identified penalty: a max-shifted one does not change with a common shift."""
    ident = evidence.ident
    if (why := no_known_z(evidence)) is not None:
        return not_applicable(ID, why)
    if ident.identified.coordinate == "max_shifted":
        return found(
            ID,
            f"The penalised quantity is {ident.identified.penalty}: it is blind to a common shift of the logits, "
            "which is what Z-loss is there to hold. Add the row maximum back.",
            0.0,
        )
    return passed(ID, "The row maximum is not left out of log Z.")
