"""Is all of the gradient explained by CE and the identified penalty?"""

from __future__ import annotations

import torch

from zloss.audit.loss import probes
from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.audit.loss.fit import ROUNDING
from zloss.audit.loss.identify import COARSE
from zloss.results.loss_audit import Finding

ID = "unexplained_source"
LARGE_VOCAB = 33000
"""Larger than one block of common kernels, so that a tail block exists."""


def check(evidence: Evidence) -> Finding:
    """The residual of the best model on the probes, at large log Z, and at a large vocabulary."""
    ident = evidence.ident
    identified, how = ident.identified, ident.selection.how
    share = ident.selection.fit.worst
    if how == "rounded":
        return not_applicable(ID, "What is left over behaves like rounding: see low_precision_source.", share)
    if how == "unexplained":
        what = "the non-CE part of the gradient" if identified.has_z else "the gradient beyond cross-entropy"
        return found(
            ID,
            f"Up to {min(share, 1.0):.1%} of {what} is explained neither by λ(log Z − c)² in any coordinate nor by any "
            f"known slip ({identified.penalty}).",
            share,
        )
    if how == "moderate_only":
        return found(
            ID,
            "The penalty is as identified for ordinary logits (log Z from −16 to 60), but another one beyond: it is "
            "clipped, or saturates.",
            share,
        )
    if identified.coordinate == "other" and not identified.extra:
        return found(ID, f"The penalty is none of the known good ones: it acts on {identified.penalty}.", share)
    error = _at_large_vocabulary(evidence)
    if error is not None and error > 2e-2:
        return found(
            ID,
            f"At V = {LARGE_VOCAB} the gradient is off by {error:.2g} (relative to its Z) from what the same loss applies at "
            f"V = {ident.space.lanes}: a vocabulary tail is miscounted?",
            error,
        )
    if identified.target_rule == "other":
        return found(ID, "c changes with the vocabulary, but not as log V.", share)
    smoothing = f" with label smoothing {identified.label_smoothing:.4g}" if identified.label_smoothing else ""
    scale = identified.ce_scale if identified.ce_scale is not None else 1.0
    scaled = f", CE scaled by {scale:.5g}" if abs(scale - 1) > 1e-3 else ""
    before = "".join(f" of logits with {key} {value:.5g}" for key, value in ident.model.warp.named().items())
    penalty = f" plus a penalty on {identified.penalty}" if identified.has_z else ""
    return passed(ID, f"Cross-entropy{before}{smoothing}{penalty} explains the gradient{scaled}.", share)


def _at_large_vocabulary(evidence: Evidence) -> float | None:
    ident = evidence.ident
    if ident.space.lanes != ident.space.width or ident.selection.how == "filtered" or ident.eps > COARSE:
        return None
    if ident.identified.extra:
        return None
    generator = torch.Generator().manual_seed(evidence.seed)
    probe = probes.mixed(generator, tokens=6, lanes=LARGE_VOCAB, width=LARGE_VOCAB)
    outcome = evidence.attempt(probe)
    if isinstance(outcome, str) or not outcome.finite:
        return None
    r = probe.reference
    z_TV = ident.model.z_source(r)
    wanted = ident.model.ce_source(r) + z_TV
    # Token by token: the source of an uncertain token is flat, and its norm vanishes beside that of a confident one.
    rounding_T = ROUNDING * ident.eps * probe.noise_T * wanted.norm(dim=-1)
    beyond_T = ((outcome.grad_TV - wanted).norm(dim=-1) - rounding_T).clamp(min=0)
    scale_T = (z_TV if ident.identified.has_z else wanted).norm(dim=-1)
    scale_T = scale_T.clamp(min=1e-9 * float(wanted.norm()))
    return float((beyond_T / scale_T).max())
