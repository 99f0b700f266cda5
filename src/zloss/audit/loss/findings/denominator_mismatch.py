"""Are CE and Z divided by the same token count?"""

from __future__ import annotations

from zloss.audit.loss.denominator import Weights
from zloss.audit.loss.evidence import NO_Z, Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "denominator_mismatch"


def check(evidence: Evidence) -> Finding:
    """λ relative to CE must not change with batch size or mask; and the names must be the expected ones."""
    ident = evidence.ident
    named, expect = ident.identified, evidence.expect
    wanted_ce = expect.get("ce_denominator", expect.get("denominator"))
    wanted_z = expect.get("z_denominator", expect.get("denominator"))
    if wanted_ce is not None and wanted_ce != named.ce_denominator:
        return found(ID, f"CE is divided by {named.ce_denominator!r}, but {wanted_ce!r} was expected.")
    if not named.has_z:
        return not_applicable(ID, NO_Z)
    if wanted_z is not None and wanted_z != named.z_denominator:
        return found(ID, f"Z is divided by {named.z_denominator!r}, but {wanted_z!r} was expected.")
    if ident.selection.how == "unexplained":
        return not_applicable(ID, "The penalty is not a known one, so its weight cannot be read.")
    ratios = [w.z / w.ce for w in ident.denominators.weights if w.ce]
    if not ratios or named.ce_denominator == "none":
        return not_applicable(ID, "No cross-entropy was found beside the Z.")
    low, high = min(ratios, key=abs), max(ratios, key=abs)
    change = abs(high / low) if low else float("inf")
    if change > 1 + max(1e-2, 16 * ident.eps):
        return found(
            ID,
            f"CE is divided by {_words(named.ce_denominator)}, Z by {_words(named.z_denominator)}: the effective λ "
            f"changes {change:.3g}x between batches ({_span(ident.denominators.weights)}).",
            change,
        )
    if not ident.denominators.masks_accepted:
        return passed(ID, "CE and Z share one denominator; the loss refuses ignored targets, so only sizes were tried.")
    return passed(ID, f"CE and Z share one denominator: {_words(named.ce_denominator)}.", change)


def _words(name: str | None) -> str:
    return {
        "valid": "the valid tokens",
        "all": "all tokens",
        "sum": "1 (a sum)",
        "mean": "the tokens",
        "other": "neither valid, all nor 1",
    }.get(name or "other", str(name))


def _span(weights: tuple[Weights, ...]) -> str:
    return ", ".join(f"{w.valid} of {w.tokens} valid" for w in weights[:3])
