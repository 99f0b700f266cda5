"""Is the gradient the derivative of the scalar?"""

from __future__ import annotations

from zloss.audit.loss.evidence import UNSTABLE, Evidence, found, not_applicable, passed
from zloss.audit.loss.finite_difference import Slope, slopes
from zloss.audit.loss.identification import Identification
from zloss.results.loss_audit import Finding

ID = "forward_backward_mismatch"
TOLERANCE = 3e-3


def check(evidence: Evidence) -> Finding:
    """Finite differences of its own scalar against its own gradient; the value itself; hidden against weight."""
    ident = evidence.ident
    if not evidence.stable:
        return not_applicable(ID, UNSTABLE)
    if ident.selection.how == "rounded":
        return not_applicable(
            ID, "Part of the loss is rounded to 16 bits: finite differences of its scalar say nothing."
        )
    if ident.coarse:
        return not_applicable(ID, "The loss computes in 16 bits: finite differences of its scalar say nothing.")
    if ident.selection.fit.damping is not None:
        return not_applicable(ID, "Gain-aware: the stop-gradient on the gain is part of the objective.")
    disagreement = hidden_against_weight(evidence) if ident.told else 0.0
    if disagreement > 1e-3:
        return found(
            ID,
            f"The gradients at hidden and at weight belong to different sources (relative {disagreement:.3g}).",
            disagreement,
        )
    worst: Slope | None = None
    for slope in slopes(evidence):
        if worst is None or slope.mismatch > worst.mismatch:
            worst = slope
    if worst is not None and worst.mismatch > TOLERANCE:
        return found(
            ID,
            f"Along {worst.words} the scalar changes by {worst.difference:.4g} per unit, its gradient says "
            f"{worst.gradient:.4g}: what is trained is not what is printed.",
            worst.mismatch,
        )
    offset = _value_offset(evidence)
    if offset is not None and abs(offset) > TOLERANCE and ident.identified.has_z:
        return found(
            ID,
            f"The scalar is off by {offset:.3g} (relative) from the objective whose gradient is returned: a constant "
            "that trains nothing, or another objective.",
            offset,
        )
    if worst is None:
        return not_applicable(ID, "No finite difference of the scalar stands out of its rounding.")
    return passed(ID, "Finite differences of the scalar agree with the gradient.", worst.mismatch)


def hidden_against_weight(evidence: Evidence) -> float:
    """dh must be δ·W with the δ read from dW."""
    outcome = evidence.ident.outcomes["mixed"]
    if outcome.grad_hidden_TD is None:
        return 0.0
    logits = evidence.ident.probes["mixed"].logits_TV
    wanted = outcome.grad_TV @ logits.T
    return float((outcome.grad_hidden_TD - wanted).norm() / wanted.norm().clamp(min=1e-300))


def _value_offset(evidence: Evidence) -> float | None:
    ident = evidence.ident
    if ident.selection.how != "explained" or ident.identified.extra or not ident.trusted:
        return None
    if any(penalty.candidate.fixed for penalty in ident.model.penalties):
        return None
    worst = 0.0
    for name, outcome in ident.outcomes.items():
        wanted = ident.model.value(ident.probes[name].reference)
        off = min(outcome.value - wanted, outcome.value - wanted + smoothing_constant(ident, name), key=abs)
        worst = max(worst, off / max(abs(wanted), 1e-12), key=abs)
    return worst


def smoothing_constant(ident: Identification, name: str) -> float:
    """What t5x takes off a smoothed cross-entropy so that its minimum is 0; 0 where the loss does not smooth."""
    r, model = ident.probes[name].reference, ident.model
    tokens = int(r.valid_T.sum())
    return float(model.ce_scale) * model.smoothing_entropy(r.lanes) * tokens / model.count(model.ce_denominator, r)
