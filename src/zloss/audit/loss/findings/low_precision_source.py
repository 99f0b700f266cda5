"""Is the source computed from rounded logits, or in 16-bit arithmetic?"""

from __future__ import annotations

from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "low_precision_source"
Z_LIMIT = 1e-2
"""Δ_src of the Z source: fp32 stays below 1e-4, fp16 logits give 0.01 to 0.03, bf16 logits 0.05 to 0.2."""
TOTAL_LIMIT = 3e-4
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
    limit = max(Z_LIMIT, 4 * evidence.floor)
    narrow = source.dtype in ("bfloat16", "float16")
    if (source.of == "z" and source.delta_src > limit) or source.delta_total > (2e-2 if narrow else TOTAL_LIMIT):
        return found(
            ID,
            f"On {source.dtype} logits the source is off by Δ_src = {source.delta_src:.3g} from fp64 "
            f"(total gradient {source.delta_total:.3g}), far beyond fp32 rounding: logits or statistics are rounded.",
            source.delta_src,
        )
    note = f"; up to {evidence.floor:.2g} of it is the rounding of the total gradient" if evidence.floor > 1e-3 else ""
    if source.bf16_inputs is not None:
        stored = " (it stores bf16 logits)" if source.bf16_inputs > BF16_STORED else ""
        note += f"; with bf16 hidden and weight its dW is off by {source.bf16_inputs:.2g}{stored}"
    return passed(ID, f"Δ_src = {source.delta_src:.3g} against fp64 on {source.dtype} logits{note}.", source.delta_src)
