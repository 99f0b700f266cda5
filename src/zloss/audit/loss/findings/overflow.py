"""Does a common shift of ±100 break it? (A naive log Σ exp overflows in fp32 at 89.)"""

from __future__ import annotations

import torch

from zloss.audit.loss import probes
from zloss.audit.loss.evidence import Evidence, found, passed
from zloss.results.loss_audit import Finding

ID = "overflow"


def check(evidence: Evidence) -> Finding:
    """fp32 logits plus ±100: finite, and still the identified gradient."""
    ident = evidence.ident
    generator = torch.Generator().manual_seed(evidence.seed)
    base = probes.continuous(generator, **ident.space.sizes())
    calm = _error(evidence, base)
    missing = sorted(set(ident.probes) - set(ident.outcomes))
    for shift in (100.0, -100.0):
        probe = base.shifted(shift)
        outcome = evidence.attempt(probe, dtype=torch.float32)
        if isinstance(outcome, str):
            return found(ID, f"A common shift of {shift:+.0f} fails: {outcome}", shift)
        if not outcome.finite:
            return found(ID, f"A common shift of {shift:+.0f} makes loss or gradient non-finite in fp32.", shift)
        error = _error(evidence, probe)
        if calm is not None and calm < 1e-3 and error is not None and error > 2e-2:
            return found(
                ID, f"A common shift of {shift:+.0f} leaves a gradient that is off by {error:.2g} (relative).", error
            )
    if missing:
        return found(ID, "Logits of ±128 to 2048 make loss or gradient non-finite.", 2048.0)
    if calm is None:
        return passed(
            ID, "A common shift of ±100 leaves loss and gradient finite; there is nothing to compare them with.", 0.0
        )
    return passed(ID, "A common shift of ±100 leaves value and gradient sound.", 0.0)


def _error(evidence: Evidence, probe: probes.Probe) -> float | None:
    ident = evidence.ident
    # Far out on a softcap the derivative itself is a difference that fp32 cannot hold.
    if not ident.trusted or ident.selection.how not in ("none", "explained") or ident.model.warp.cap is not None:
        return None
    outcome = evidence.attempt(probe, dtype=torch.float32)
    if isinstance(outcome, str):
        return None
    wanted = ident.model.ce_source(probe.reference) + ident.model.z_source(probe.reference)
    return float((outcome.grad_TV - wanted).norm() / wanted.norm())
