"""Is there a Z in the value that never reaches the gradient (detached logits, Z of log-probabilities)?"""

from __future__ import annotations

from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "zero_gradient_z"


def check(evidence: Evidence) -> Finding:
    """Compare the scalar with cross-entropy where the gradient is cross-entropy alone."""
    ident = evidence.ident
    if ident.identified.has_z:
        return passed(ID, "The Z source is there in the gradient.")
    if ident.selection.how != "none":
        return not_applicable(ID, "The gradient holds something beyond CE that is not a known penalty.")
    excess = 0.0
    for name, outcome in ident.outcomes.items():
        expected = ident.model.value(ident.probes[name].reference)
        if abs(outcome.value - expected) > 1e-4 * (1 + abs(expected)) * max(1.0, ident.eps / 2**-24):
            excess = max(excess, outcome.value - expected, key=abs)
    if excess:
        return found(
            ID,
            f"The value differs from cross-entropy by up to {excess:.4g}, but the gradient is cross-entropy alone: "
            "a Z is reported that trains nothing (detached, or a constant).",
            excess,
        )
    if evidence.expect.get("coef"):
        return found(
            ID,
            f"A Z with λ = {float(evidence.expect['coef']):.3g} was expected, but neither value nor gradient holds one.",
            0.0,
        )
    return not_applicable(
        ID, "Neither value nor gradient holds a Z; pass expect={'coef': ...} if you believe there is one."
    )
