"""Are small gradient entries, or confident tokens, set to zero and their Z source with them?"""

from __future__ import annotations

from torch import Tensor

from zloss.audit.loss.evidence import Evidence, found, no_known_z, not_applicable, passed
from zloss.audit.loss.select import dropped
from zloss.results.loss_audit import Finding

ID = "filtered_source"


def check(evidence: Evidence) -> Finding:
    """Entries that are exactly 0 although the penalty that explains all others is not."""
    ident = evidence.ident
    if (why := no_known_z(evidence)) is not None:
        return not_applicable(ID, why)
    if ident.selection.how != "filtered":
        return passed(ID, "No entry of the Z source is missing.")
    fit = ident.selection.fit
    lost = dropped(fit, ident.data)
    whole = float(fit.auxiliary_TV.abs().sum())
    share = float(fit.auxiliary_TV[lost].abs().sum()) / whole if whole else 0.0
    rows = int(lost.any(-1).sum())
    return found(
        ID,
        f"Gradient entries come back exactly 0 where the Z source is not ({rows} probe tokens, {share:.1%} of its "
        f"mass): {_cause(evidence, lost)}.",
        share,
    )


def _cause(evidence: Evidence, lost_TV: Tensor) -> str:
    """What separates the lost entries from the kept ones: |p − y|, p, the row, or nothing that was tried."""
    data = evidence.ident.data
    r = data.reference
    kept = data.grad_TV != 0
    if not bool(kept.any(-1)[lost_TV.any(-1)].any()):
        return "whole rows are dropped"
    measures = {"|p − y|": (r.p_TV - r.onehot_TV).abs(), "p": r.p_TV}
    for name, value in measures.items():
        highest, lowest = float(value[lost_TV].max()), float(value[kept].min())
        if highest <= lowest:
            drops = " This drops the Z of confident tokens" if name != "p" else ""
            return f"entries with {name} up to {highest:.3g} are dropped, those from {lowest:.3g} on are kept.{drops}"
    logits = data.given.logits_TV
    if float(logits[lost_TV].min()) > float(logits[kept].max()):
        return f"logits above {float(logits[kept].max()):.5g} have no gradient, as if clamped"
    return "what they have in common was not found"
