"""Does a batch whose tokens are all ignored stay finite? And does an infinite logit of an ignored token stay outside?"""

from __future__ import annotations

import math

import torch

from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "all_ignored_nonfinite"


def check(evidence: Evidence) -> Finding:
    """All targets ignored; then one ignored token with a +inf logit, which a mask by multiplication turns into NaN."""
    ident = evidence.ident
    probe = ident.probes["mixed"]
    tokens = len(probe.target_T)
    some = evidence.attempt(probe.masked(torch.arange(tokens) % 2 == 0))
    if isinstance(some, str):
        return not_applicable(ID, f"Ignored targets could not be tried: {some}")
    outcome = evidence.attempt(probe.masked(torch.zeros(tokens, dtype=torch.bool)))
    if isinstance(outcome, str):
        return found(ID, f"A batch whose tokens are all ignored fails: {outcome}")
    if not outcome.finite:
        what = "loss" if not math.isfinite(outcome.value) else "gradient"
        return found(ID, f"A batch whose tokens are all ignored gives a non-finite {what} (0/0).")
    silent = not bool(some.grad_TV[1::2].any())
    if silent and not evidence.box.linear:
        # With hidden and weight an infinite logit cannot be given to one token alone.
        logits = probe.logits_TV.clone()
        logits[1, 0] = math.inf
        keep = torch.ones(tokens, dtype=torch.bool)
        keep[1] = False
        leak = evidence.attempt(probe.with_logits(logits).masked(keep))
        if isinstance(leak, str):
            return passed(ID, f"All-ignored batches are sound; infinite logits could not be tried: {leak}")
        # The ignored row's own gradient is not judged: PyTorch's cross_entropy leaves NaN there.
        if not (math.isfinite(leak.value) and bool(torch.isfinite(leak.grad_TV[keep]).all())):
            return found(
                ID, "An infinite logit of an ignored token makes the loss non-finite: the mask multiplies (inf · 0)."
            )
    return passed(ID, f"All-ignored batches give a finite loss ({outcome.value:.3g}).", outcome.value)
