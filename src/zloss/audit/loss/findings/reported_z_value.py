"""Is the reported Z the one that is trained?"""

from __future__ import annotations

import math

from zloss.audit.loss.evidence import CANNOT_TELL, Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "reported_z_value"


def check(evidence: Evidence) -> Finding:
    """The reported number against λ Σ (v − c)²/D of the penalty that the gradient holds."""
    ident, z = evidence.ident, evidence.reported
    if z is None:
        untrained = any(one.role == "z_not_trained" for one in evidence.returned)
        more = " A (log Z)² is returned, and the loss does not train it." if untrained else ""
        return not_applicable(ID, f"The loss reports no Z apart.{more}")
    if not ident.told:
        return not_applicable(ID, CANNOT_TELL)
    if not ident.trusted:
        return not_applicable(ID, "Token weights or the form of the penalty keep its value from being predicted.")
    values = [outcome.item(z.name) for outcome in ident.outcomes.values()]
    if any(one is not None and one.value is not None and not math.isfinite(one.value) for one in values):
        return found(ID, "The reported Z is not finite on ordinary logits.")
    if z.masked is not None:
        said, trained = z.masked
        if z.role == "z_without_coef":
            what = "the mean of (log Z − c)²"
        else:
            what = "the one that is trained"
        return found(
            ID,
            f"The reported Z (`{z.name}`) is {what} on batches without ignored tokens only: where tokens are ignored it is "
            f"{said:.4g}, and {trained:.4g} over the tokens that are trained.",
            said / trained if trained else None,
        )
    if z.role == "z":
        return passed(ID, f"The reported Z (`{z.name}`) is the one that is trained.", 1.0)
    if z.role == "z_without_coef":
        return passed(ID, f"The reported Z (`{z.name}`) is the mean of (log Z − c)² without its λ.", 1.0)
    if z.role == "z_multiple":
        ratio = z.ratio or 0.0
        return found(ID, f"The reported Z (`{z.name}`) is {ratio:.4g} times the Z that is trained.", ratio)
    if not ident.identified.has_z:
        silent = all(one is None or one.value == 0 for one in values)
        if silent:
            return passed(ID, "The reported Z is 0, and none is trained.", 0.0)
        return found(ID, f"A Z is reported (`{z.name}`), but the gradient holds none.")
    return found(ID, f"The value `{z.name}` is called a Z, but is neither the Z that is trained nor a multiple of it.")
