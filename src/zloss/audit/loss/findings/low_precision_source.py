"""Is the source computed from rounded logits, or in 16-bit arithmetic?"""

from __future__ import annotations

import torch

from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.audit.loss.precision import UNIT
from zloss.audit.loss.source_error import beyond_rounding
from zloss.results.loss_audit import Finding

ID = "low_precision_source"
FACTOR_LIMIT = 5e-2
"""A factor on Z or CE with 16-bit logits that rounding of the gradient to 16 bits does not explain."""
BF16_STORED = 5e-3
"""Error of dW on bf16 inputs that only bf16 logits explain. Told, not held against it: it needs bf16 inputs to happen."""


def check(evidence: Evidence) -> Finding:
    """Δ_src against fp64 on the audited logits, beyond what fp32 rounding of the total gradient can cause."""
    ident, source = evidence.ident, evidence.source
    if ident.identified.computes_in in ("bfloat16", "float16"):
        return found(
            ID,
            f"Its gradients are {ident.identified.computes_in} numbers although the logits were not: the loss computes "
            "in 16 bits.",
            source.delta_src,
        )
    if ident.selection.how == "rounded":
        share = ident.identified.uncertainty.unexplained
        return found(
            ID,
            f"{share or 0.0:.1%} of the non-CE gradient is noise that changes with every small shift of the logits: part "
            "of the source is computed in 16 bits.",
            share,
        )
    if ident.selection.how == "filtered":
        return not_applicable(ID, "Entries are missing from the source: see filtered_source.", source.delta_src)
    if source.delta_src is None or source.delta_total is None:
        return not_applicable(ID, f"Not measured: {source.reason}.")
    if beyond_rounding(source, evidence.floor):
        return found(
            ID,
            f"On {source.dtype} logits the source is off by Δ_src = {source.delta_src:.3g} from fp64 "
            f"(total gradient {source.delta_total:.3g}), far beyond fp32 rounding: logits or statistics are rounded.",
            source.delta_src,
        )
    if (other := _in_16_bits(evidence)) is not None:
        return other
    note = f"; up to {evidence.floor:.2g} of it is the rounding of the total gradient" if evidence.floor > 1e-3 else ""
    if source.bf16_inputs is not None:
        stored = " (it stores bf16 logits)" if source.bf16_inputs > BF16_STORED else ""
        note += f"; with bf16 hidden and weight its dW is off by {source.bf16_inputs:.2g}{stored}"
    return passed(ID, f"Δ_src = {source.delta_src:.3g} against fp64 on {source.dtype} logits{note}.", source.delta_src)


def _in_16_bits(evidence: Evidence) -> Finding | None:
    """A finding where 16-bit logits, as mixed precision passes them, get another objective.

    Read from saturated rows, which 16 bits hold exactly: on their target CE is silent and the Z stands alone; elsewhere the
    entry of the target is CE alone.
    """
    ident = evidence.ident
    group = "wide" if "wide" in ident.outcomes else "saturated"
    got, probe = ident.identified, ident.probes[group]
    known = not got.has_z or got.coordinate in ("raw", "centered")
    if not known or not ident.plain or not ident.model.warp.identity or got.label_smoothing:
        return None
    r = probe.reference
    ce_TV, z_TV = ident.model.ce_source(r), ident.model.z_source(r)
    silent, onehot_TV = r.cross_entropy_T == 0, r.onehot_TV
    ce_T, alone_TV = (ce_TV * onehot_TV).sum(-1)[~silent], z_TV[silent]
    weight = abs(ident.model.ce_scale) / ident.model.count(ident.model.ce_denominator, r)
    wide = str(ident.dtype).removeprefix("torch.")
    for dtype in (torch.bfloat16, torch.float16):
        outcome = evidence.attempt(probe, dtype=dtype)
        if isinstance(outcome, str) or not outcome.finite:
            continue
        name, grad_TV = str(dtype).removeprefix("torch."), outcome.grad_TV
        if not got.has_z:
            extra = float(grad_TV[silent].norm() / ce_TV.norm().clamp(min=1e-300))
            if extra > 1e-3:
                return found(
                    ID,
                    f"With {name} logits there is a source in addition to cross-entropy, with {wide} logits there is none.",
                    extra,
                )
        # A kernel that forms 1 + 2λ(log Z − c) in 16 bits rounds every row by a unit of the weight on CE.
        noise = UNIT[name] * weight * len(alone_TV) ** 0.5 / max(float(alone_TV.norm()), 1e-300)
        limit = max(FACTOR_LIMIT, 8 * noise)
        # Below its normal range fp16 holds few digits.
        readable = got.has_z and limit < 0.5 and (dtype == torch.bfloat16 or float(alone_TV.abs().max()) > 2.0**-18)
        z = float((grad_TV[silent] * alone_TV).sum() / (alone_TV * alone_TV).sum()) if readable else 1.0
        entries_T = ((grad_TV - z * z_TV) * onehot_TV).sum(-1)[~silent]
        ce = float((entries_T * ce_T).sum() / (ce_T * ce_T).sum()) if bool(ce_T.any()) else 1.0
        if abs(z - 1) > limit or abs(ce - 1) > FACTOR_LIMIT:
            of_z = f"λ is {z:.3g} times and " if readable else ""
            return found(
                ID, f"With {name} logits {of_z}the weight on CE is {ce:.3g} times what it is with {wide} logits.", z
            )
    return None
