"""Do ignored tokens receive a gradient?"""

from __future__ import annotations

import torch

from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "ignored_tokens_leak"


def check(evidence: Evidence) -> Finding:
    """Mask tokens at random, in no pattern that a shifted mask repeats, and look at the rows that should be silent."""
    probe = evidence.ident.probes["mixed"]
    if evidence.ident.targets_unused:
        return not_applicable(
            ID, "The function does not read its targets, so no token is ignored: see unexplained_source."
        )
    keep = torch.rand(len(probe.target_T), generator=torch.Generator().manual_seed(evidence.seed + 7)) < 0.5
    keep[0], keep[-1] = True, False
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
    # Where hidden and weight are changed before their product, the columns of dW mix tokens; the rows of dh never do.
    rows_TX = outcome.grad_TV if outcome.grad_hidden_TD is None else outcome.grad_hidden_TD
    inside, whole = float(rows_TX[keep].norm()), max(float(rows_TX.norm()), 1e-300)
    share = float(rows_TX[~keep].norm()) / (inside or whole)
    silent = int((rows_TX[keep].norm(dim=-1) == 0).sum())
    if share > 1e-7:
        more = (
            f", and {silent} of {int(keep.sum())} valid ones receive none (is the mask shifted?)" if silent > 2 else ""
        )
        return found(
            ID,
            f"Ignored tokens receive a gradient ({share:.3g} of the norm on valid ones){more}: padding trains the model.",
            share,
        )
    if not inside:
        return not_applicable(ID, "With some tokens ignored no token receives a gradient, so nothing can leak.")
    return passed(ID, "Ignored tokens receive no gradient.", share)
