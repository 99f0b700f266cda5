"""Is there a Z in the value that never reaches the gradient (detached logits, Z of log-probabilities)?"""

from __future__ import annotations

from zloss.audit.loss.evidence import CANNOT_TELL, Evidence, found, not_applicable, passed
from zloss.audit.loss.findings.forward_backward_mismatch import hidden_against_weight, smoothing_constant
from zloss.results.loss_audit import Finding

ID = "zero_gradient_z"


def check(evidence: Evidence) -> Finding:
    """Compare the scalar with cross-entropy where the gradient is cross-entropy alone."""
    ident = evidence.ident
    if ident.identified.has_z is None:
        return not_applicable(ID, CANNOT_TELL)
    if ident.identified.has_z:
        return passed(ID, "The Z source is there in the gradient.")
    if not ident.trusted:
        return not_applicable(ID, "Token weights keep the value of the cross-entropy from being predicted.")
    excess = 0.0
    for name, outcome in ident.outcomes.items():
        expected = ident.model.value(ident.probes[name].reference)
        slack = 1e-4 * (1 + abs(expected)) * max(1.0, ident.eps / 2**-24)
        entropy = smoothing_constant(ident, name)
        if min(abs(outcome.value - expected), abs(outcome.value - expected + entropy)) > slack:
            excess = max(excess, outcome.value - expected, key=abs)
    if excess and hidden_against_weight(evidence) > 1e-3:
        return found(
            ID,
            f"The value differs from cross-entropy by up to {excess:.4g}, but the gradient at the weight is cross-entropy alone: "
            "a Z is reported that does not train the weight.",
            excess,
        )
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
        ID, "Neither value nor gradient holds a Z; pass `expect={'coef': λ}` if you believe there is one."
    )
