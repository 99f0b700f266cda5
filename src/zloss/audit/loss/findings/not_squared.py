"""Is the square missing, λ·mean(log Z) in place of λ·mean((log Z − c)²)?"""

from __future__ import annotations

from zloss.audit.loss.candidates import NOT_SQUARED
from zloss.audit.loss.evidence import Evidence, found, no_known_z, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "not_squared"


def check(evidence: Evidence) -> Finding:
    """Read from the identified penalty: its source does not depend on log Z."""
    if (why := no_known_z(evidence)) is not None:
        return not_applicable(ID, why)
    if set(evidence.ident.selection.fit.candidates) & set(NOT_SQUARED):
        got = evidence.ident.identified
        return found(
            ID,
            f"The penalty is {got.penalty}, with λ = {got.coef or 0.0:.5g}. Its source is the same at every log Z, so it "
            "drives log Z down without end and has no target: square it.",
            got.coef,
        )
    return passed(ID, "The penalty depends on log Z as it should: its source is not constant.")
