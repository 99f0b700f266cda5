"""Are the caller's tensors still what they were after forward and backward?"""

from __future__ import annotations

from zloss.audit.loss.evidence import Evidence, found, passed
from zloss.audit.loss.result import Finding

ID = "overwrites_input"


def check(evidence: Evidence) -> Finding:
    """Contents before the call against contents after backward."""
    changed = sorted({name for outcome in evidence.ident.outcomes.values() for name in outcome.overwritten})
    if changed:
        names = " and ".join(f"`{name}`" for name in changed)
        return found(
            ID, f"{names} no longer held the caller's values after the call: nothing else may read them.", len(changed)
        )
    return passed(ID, "The inputs are left as they were.", 0.0)
