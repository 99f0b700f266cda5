"""Is "off" off?"""

from __future__ import annotations

from dataclasses import replace

import torch

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.audit.loss.identification import Identification
from zloss.audit.loss.identify import identify
from zloss.audit.loss.measured import measure
from zloss.audit.loss.outcome import Outcome
from zloss.audit.loss.precision import UNIT, computes_in
from zloss.audit.loss.select import Selection, select
from zloss.results.loss_audit import Finding

ID = "not_off"
NEGLIGIBLE = 1e-6
"""The share of the applied Z below which what "off" leaves beside CE is noise."""


def check(evidence: Evidence) -> Finding:
    """The loss with its Z switched off must be cross-entropy, in gradient and in value."""
    if evidence.off is None:
        return not_applicable(ID, "Pass the same loss with its Z switched off as `off=`.")
    ident = evidence.ident
    outcomes: dict[str, Outcome] = {}
    for name, probe in ident.probes.items():
        outcome = evidence.off(probe.logits_TV, probe.target_T, dtype=ident.dtype)
        if outcome.finite:
            outcomes[name] = outcome
    if not outcomes:
        return found(ID, "The loss with Z off gives no finite value on the probes.")
    eps = _coarser(evidence.off, ident, evidence.seed)
    chosen = select(measure([(ident.probes[name], outcome.grad_TV) for name, outcome in outcomes.items()], eps))
    if chosen.how == "unexplained":
        return _token_by_token(evidence, evidence.off)
    if chosen.how != "none" and _share(chosen, ident.selection) > NEGLIGIBLE:
        slope = chosen.fit.slope[0] if chosen.fit.slope else 0.0
        on = ident.selection.fit.slope[0] if ident.selection.fit.slope else 0.0
        share = f" ({slope / on:.3g} of the λ that is applied when on)" if on else ""
        return found(ID, f"With Z switched off the gradient still holds a Z{share}: off is not off.", slope)
    return passed(ID, "With Z switched off the gradient is cross-entropy alone.", 0.0)


def _token_by_token(evidence: Evidence, off: BlackBox) -> Finding:
    """An off whose CE has token weights, warped logits or another form: identified as a loss of its own."""
    alone = identify(replace(off), evidence.ident.space, evidence.seed).identified
    if alone.has_z is None:
        return not_applicable(ID, f"What the loss with Z off applies could not be identified. {alone.reason}")
    if alone.has_z:
        return found(ID, "With Z switched off the gradient still holds a Z: off is not off.", alone.coef)
    return passed(ID, "With Z switched off the gradient is cross-entropy alone.", 0.0)


def _coarser(off: BlackBox, ident: Identification, seed: int) -> float:
    """The unit roundoff of the loss or of the one without Z, whichever rounds more."""
    space = ident.space
    probe = probes.continuous(torch.Generator().manual_seed(seed), **space.sizes())
    return max(ident.eps, UNIT[computes_in(off, probe, ident.dtype)])


def _share(left: Selection, on: Selection) -> float:
    """‖what "off" holds beside CE‖ / ‖the Z when on‖ over the probes; infinite where there is no Z when on."""
    applied = float(on.fit.auxiliary_TV.norm())
    return float((left.fit.auxiliary_TV + left.fit.residual_TV).norm()) / applied if applied > 0 else float("inf")
