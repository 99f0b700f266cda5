"""Do gradients honour what multiplies the loss?"""

from __future__ import annotations

import torch

from zloss.audit.loss.evidence import UNSTABLE, Evidence, found, not_applicable, passed
from zloss.audit.loss.output import LossCallError
from zloss.results.loss_audit import Finding

ID = "upstream_ignored"


def check(evidence: Evidence) -> Finding:
    """k·loss must give k·gradient; Σ u_t ℓ_t of the per-token variant must give u_t times each row."""
    ident = evidence.ident
    if not evidence.stable:
        return not_applicable(ID, UNSTABLE)
    probe, base = ident.probes["mixed"], ident.outcomes["mixed"].grad_TV
    tolerance = 1e-2 if ident.selection.how == "rounded" else max(1e-4, 8 * ident.eps)
    worst = 0.0
    for factor in (3.0, -0.5):
        outcome = evidence.attempt(probe, upstream=factor)
        if isinstance(outcome, str):
            return found(ID, f"Multiplying the loss by {factor} fails: {outcome}")
        error = float((outcome.grad_TV - factor * base).norm()) / max(abs(factor) * float(base.norm()), 1e-300)
        worst = max(worst, error)
    if not worst <= tolerance:
        return found(ID, f"k · loss does not give k · gradient (relative error {worst:.3g}).", worst)
    if evidence.per_token is None:
        return passed(
            ID,
            "k · loss gives k · gradient. Pass its reduction='none' variant as `per_token=` to check that one too.",
            worst,
        )
    generator = torch.Generator().manual_seed(evidence.seed)
    upstream_T = 0.25 + torch.rand(len(probe.target_T), generator=generator, dtype=torch.float64)
    upstream_T[::5] *= -1
    try:
        ones = evidence.per_token(
            probe.logits_TV, probe.target_T, dtype=ident.dtype, upstream=torch.ones_like(upstream_T), per_token=True
        )
        given = evidence.per_token(
            probe.logits_TV, probe.target_T, dtype=ident.dtype, upstream=upstream_T, per_token=True
        )
    except LossCallError as error:
        return not_applicable(ID, f"The per-token variant could not be tried: {error}")
    wanted = upstream_T.unsqueeze(-1) * ones.grad_TV
    if not ones.has_gradient or not float(wanted.norm()) > 0:
        return found(ID, "The per-token variant has no gradient.", 1.0)
    error_T = float((given.grad_TV - wanted).norm()) / float(wanted.norm())
    if not error_T <= tolerance:
        return found(
            ID,
            f"The per-token variant does not honour per-token upstream gradients (relative error {error_T:.3g}).",
            error_T,
        )
    return passed(ID, "Upstream gradients are honoured, per token too.", max(worst, error_T))
