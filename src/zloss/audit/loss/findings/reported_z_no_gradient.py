"""Does a reported Z that claims a gradient have one?"""

from __future__ import annotations

from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "reported_z_no_gradient"


def check(evidence: Evidence) -> Finding:
    """Backpropagate through the reported Z alone. Detached openly (`requires_grad` False) is fine."""
    z = evidence.reported
    plain = None if z is None else evidence.ident.outcomes["mixed"].item(z.name)
    if plain is None:
        return not_applicable(ID, "The loss reports no Z apart.")
    if not plain.requires_grad:
        return passed(ID, "The reported Z is openly detached: nobody can train on it by mistake.")
    outcome = evidence.attempt(evidence.ident.probes["mixed"], through=plain.name)
    if isinstance(outcome, str):
        return found(ID, f"The reported Z requires a gradient, but backward through it fails: {outcome}")
    norm = float(outcome.grad_TV.norm())
    if norm == 0.0:
        return found(ID, "The reported Z has `requires_grad`, but its gradient at the logits is zero: silently.", 0.0)
    return passed(ID, "The reported Z carries a gradient.", norm)
