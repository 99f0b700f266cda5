"""Is the logsumexp taken of probabilities instead of logits?"""

from __future__ import annotations

from zloss.audit.loss.candidates import PROBABILITIES
from zloss.audit.loss.evidence import Evidence, found, no_known_z, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "probabilities_not_logits"


def check(evidence: Evidence) -> Finding:
    """Read from the identified penalty."""
    ident = evidence.ident
    if (why := no_known_z(evidence)) is not None:
        return not_applicable(ID, why)
    names = {candidate.name for candidate in ident.selection.fit.candidates}
    if names & PROBABILITIES:
        return found(
            ID,
            "Z is the logsumexp of the probabilities: it lies between log V and log(V + e − 1) whatever the logits "
            "are, and nothing holds their normalizer. Pass the logits.",
            ident.identified.coef,
        )
    return passed(ID, "Z is not taken of probabilities.")
