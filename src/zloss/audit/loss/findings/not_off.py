"""Is "off" off?"""

from __future__ import annotations

from zloss.audit.loss.callable import Outcome
from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.audit.loss.fit import measure
from zloss.audit.loss.result import Finding
from zloss.audit.loss.select import select

ID = "not_off"


def check(evidence: Evidence) -> Finding:
    """The loss with its Z switched off must be cross-entropy, in gradient and in value."""
    if evidence.off is None:
        return not_applicable(ID, "Pass off=<the same loss with its Z switched off> (--off MODULE:FUNCTION).")
    ident = evidence.ident
    outcomes: dict[str, Outcome] = {}
    for name, probe in ident.probes.items():
        outcome = evidence.off(probe.logits_TV, probe.target_T, dtype=ident.dtype)
        if outcome.finite:
            outcomes[name] = outcome
    if not outcomes:
        return found(ID, "The loss with Z off gives no finite value on the probes.")
    data = measure([(ident.probes[name], outcome.grad_TV) for name, outcome in outcomes.items()], ident.eps)
    chosen = select(data)
    if chosen.how != "none":
        slope = chosen.fit.slope[0] if chosen.fit.slope else 0.0
        on = ident.selection.fit.slope[0] if ident.selection.fit.slope else 0.0
        share = f" ({slope / on:.3g} of the λ that is applied when on)" if on else ""
        return found(ID, f"With Z switched off the gradient still holds a Z{share}: off is not off.", slope)
    return passed(ID, "With Z switched off the gradient is cross-entropy alone.", 0.0)
