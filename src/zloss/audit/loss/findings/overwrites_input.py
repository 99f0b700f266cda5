"""Are the caller's tensors still what they were after forward and backward?"""

from __future__ import annotations

import torch

from zloss.audit.loss.evidence import Evidence, found, passed
from zloss.results.loss_audit import Finding

ID = "overwrites_input"


def check(evidence: Evidence) -> Finding:
    """Contents before the call against contents after backward, in every dtype: `float()` copies all but fp32."""
    ident, probe = evidence.ident, evidence.ident.probes["mixed"]
    # Some losses rewrite only the targets they ignore.
    masked = probe.masked(torch.arange(len(probe.target_T)) % 2 == 0)
    changed: dict[str, set[str]] = {}
    tried: list[str] = []
    for dtype in (ident.dtype, torch.float32, torch.bfloat16, torch.float16):
        outcome = evidence.attempt(masked, dtype=dtype)
        if isinstance(outcome, str):
            outcome = evidence.attempt(probe, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        if isinstance(outcome, str) or name in tried:
            continue
        tried.append(name)
        for argument in outcome.overwritten:
            changed.setdefault(argument, set()).add(name)
    for outcome in ident.outcomes.values():
        for argument in outcome.overwritten:
            changed.setdefault(argument, set()).add(str(ident.dtype).removeprefix("torch."))
    if changed:
        names = " and ".join(f"`{name}`" for name in sorted(changed))
        seen = set().union(*changed.values())
        where = (
            ""
            if seen >= set(tried)
            else f" in {' and '.join(sorted(seen))} (not in {', '.join(sorted({*tried} - seen))})"
        )
        return found(
            ID,
            f"{names} no longer held the caller's values after the call{where}: nothing else may read them.",
            len(changed),
        )
    return passed(ID, f"The inputs are left as they were, in {', '.join(tried)}.", 0.0)
