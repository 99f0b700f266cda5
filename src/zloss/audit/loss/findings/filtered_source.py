"""Are small gradient entries, or confident tokens, set to zero and their Z source with them?"""

from __future__ import annotations

from zloss.audit.loss.evidence import NO_Z, Evidence, found, not_applicable, passed
from zloss.audit.loss.select import dropped
from zloss.results.loss_audit import Finding

ID = "filtered_source"


def check(evidence: Evidence) -> Finding:
    """Entries that are exactly 0 although the penalty that explains all others is not."""
    ident = evidence.ident
    if not ident.identified.has_z:
        return not_applicable(ID, NO_Z)
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
        "mass): filtering by |p − y| drops the Z of confident tokens.",
        share,
    )
