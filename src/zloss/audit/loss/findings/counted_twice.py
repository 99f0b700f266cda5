"""Is the applied λ a whole multiple of the one the user set?"""

from __future__ import annotations

from zloss.audit.loss.evidence import Evidence, found, no_z, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "counted_twice"


def check(evidence: Evidence) -> Finding:
    """λ identified over λ expected."""
    expected, identified = evidence.expect.get("coef"), evidence.ident.identified
    if not expected:
        return not_applicable(ID, "Pass `expect={'coef': λ, 'target': c}`: what you believe the loss applies.")
    if not identified.has_z or identified.coef is None:
        return not_applicable(ID, no_z(evidence) or "The penalty is not a known one, so its λ cannot be compared.")
    ratio = identified.coef / float(expected)
    whole = round(ratio)
    if whole >= 2 and abs(ratio - whole) < 1e-2 * whole:
        return found(
            ID,
            f"λ = {identified.coef:.5g} is {whole} times the expected {float(expected):.5g}: Z is added again.",
            ratio,
        )
    return passed(ID, f"λ is {ratio:.5g} times the expected one.", ratio)
