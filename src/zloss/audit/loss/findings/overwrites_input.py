"""Are the caller's tensors still what they were after forward and backward?"""

from __future__ import annotations

import torch

from zloss.audit.loss.evidence import Evidence, found, passed
from zloss.results.loss_audit import Finding

ID = "overwrites_input"


def check(evidence: Evidence) -> Finding:
    """Contents before the call against contents after backward."""
    outcomes = list(evidence.ident.outcomes.values())
    probe = evidence.ident.probes["mixed"]
    # Some losses rewrite only the targets they ignore.
    masked = evidence.attempt(probe.masked(torch.arange(len(probe.target_T)) % 2 == 0))
    if not isinstance(masked, str):
        outcomes.append(masked)
    changed = sorted({name for outcome in outcomes for name in outcome.overwritten})
    if changed:
        names = " and ".join(f"`{name}`" for name in changed)
        return found(
            ID, f"{names} no longer held the caller's values after the call: nothing else may read them.", len(changed)
        )
    return passed(ID, "The inputs are left as they were.", 0.0)
