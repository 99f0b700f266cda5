"""Do ignored tokens receive a gradient?"""

from __future__ import annotations

import torch

from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "ignored_tokens_leak"


def check(evidence: Evidence) -> Finding:
    """Mask every other token and look at the rows that should be silent."""
    probe = evidence.ident.probes["mixed"]
    keep = torch.arange(len(probe.target_T)) % 2 == 0
    outcome = evidence.attempt(probe.masked(keep))
    if isinstance(outcome, str):
        return not_applicable(ID, f"Ignored targets could not be tried: {outcome}")
    if not outcome.finite:
        return found(ID, "A batch with ignored tokens gives a non-finite loss or gradient.")
    if outcome.beyond > 1e-7 * float(outcome.grad_TV.norm()):
        share = outcome.beyond / max(float(outcome.grad_TV.norm()), 1e-300)
        return found(
            ID,
            f"The last row, which has no target, receives a gradient ({share:.3g} of the norm on all others).",
            share,
        )
    inside = float(outcome.grad_TV[keep].norm())
    share = float(outcome.grad_TV[~keep].norm()) / inside if inside else 0.0
    if share > 1e-7:
        return found(
            ID,
            f"Ignored tokens receive a gradient ({share:.3g} of the norm on valid ones): padding trains the model.",
            share,
        )
    return passed(ID, "Ignored tokens receive no gradient.", share)
