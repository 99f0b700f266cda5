"""Is the logsumexp taken of probabilities instead of logits?"""

from __future__ import annotations

from zloss.audit.loss.candidates import PROBABILITIES
from zloss.audit.loss.evidence import NO_Z, Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "probabilities_not_logits"


def check(evidence: Evidence) -> Finding:
    """The identified penalty says."""
    ident = evidence.ident
    if not ident.identified.has_z:
        return not_applicable(ID, NO_Z)
    names = {candidate.name for candidate in ident.selection.fit.candidates}
    if ident.selection.how != "unexplained" and names & PROBABILITIES:
        return found(
            ID,
            "Z is the logsumexp of the probabilities: it lies between log V and log(V + e − 1) whatever the logits "
            "are, and nothing holds their normalizer. Pass the logits.",
            ident.identified.coef,
        )
    return passed(ID, "Z is not taken of probabilities.")
