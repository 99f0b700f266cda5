"""Are CE and Z divided by the same token count?"""

from __future__ import annotations

from zloss.audit.loss.denominator import Weights
from zloss.audit.loss.evidence import CANNOT_TELL, NO_Z, Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding, Identified

ID = "denominator_mismatch"


def check(evidence: Evidence) -> Finding:
    """λ relative to CE must not change with batch size or mask; and the names must be the expected ones."""
    ident = evidence.ident
    named, expect = ident.identified, evidence.expect
    wanted_ce = expect.get("ce_denominator", expect.get("denominator"))
    wanted_z = expect.get("z_denominator", expect.get("denominator"))
    if not ident.told:
        return not_applicable(ID, CANNOT_TELL)
    if wanted_ce is not None and wanted_ce != named.ce_denominator:
        return found(ID, f"CE is divided by {named.ce_denominator!r}, but {wanted_ce!r} was expected.")
    if not named.has_z:
        return not_applicable(ID, NO_Z)
    if wanted_z is not None and wanted_z != named.z_denominator:
        return found(ID, f"Z is divided by {named.z_denominator!r}, but {wanted_z!r} was expected.")
    if ident.special:
        others = ", ".join(str(one.index) for one in ident.special)
        return not_applicable(ID, f"CE has class weights (class {others}), so the two denominators cannot be compared.")
    if named.ce_weights in ("class", "position", "token"):
        return _weighted(named)
    if any(w.misplaced for w in ident.denominators.weights):
        return not_applicable(ID, "Ignored tokens are trained and valid ones are not: see ignored_tokens_leak.")
    ratios = [w.z / w.ce for w in ident.denominators.weights if w.ce]
    if not ratios or named.ce_denominator == "none":
        return not_applicable(ID, "No cross-entropy was found beside the Z.")
    if len(ratios) < 2:
        return not_applicable(ID, "The loss accepts one size and no mask, so denominators cannot be told apart.")
    low, high = min(ratios, key=abs), max(ratios, key=abs)
    change = abs(high / low) if low else float("inf")
    if change > 1 + max(1e-2, 16 * ident.eps):
        return found(
            ID,
            f"CE is divided by {_words(named.ce_denominator)}, Z by {_words(named.z_denominator)}: λ relative to the "
            f"weight on CE changes by a factor of {change:.3g} between batches with {_span(ident.denominators.weights)}.",
            change,
        )
    if not ident.denominators.masks_accepted:
        return passed(ID, "CE and Z share one denominator; the loss refuses ignored targets, so only sizes were tried.")
    if named.ce_weights == "groups":
        return passed(ID, "Groups of tokens are averaged, then their means; CE and Z share these weights.", change)
    return passed(ID, f"CE and Z share one denominator: {_words(named.ce_denominator)}.", change)


def _weighted(named: Identified) -> Finding:
    """Token weights differ by design; what can be compared are the counts behind the two means."""
    kind = {"class": "class weights", "position": "weights by position"}.get(named.ce_weights or "", "token weights")
    if named.z_weights == "shared":
        return passed(ID, f"CE has {kind}, and Z shares them.")
    if named.ce_denominator == named.z_denominator != "other":
        return passed(ID, f"CE has {kind}, Z has none; both are divided by {_words(named.ce_denominator)}.")
    return not_applicable(ID, f"CE has {kind} and Z has none, so their denominators cannot be compared.")


def _words(name: str | None) -> str:
    return {
        "valid": "the valid tokens",
        "all": "all tokens",
        "sum": "1 (a sum)",
        "mean": "the tokens",
        "valid+1": "the valid tokens plus 1",
        "valid-1": "the valid tokens less 1",
        "all+1": "all tokens plus 1",
        "mean+1": "the tokens plus 1",
        "mean-1": "the tokens less 1",
        "sqrt_valid": "the square root of the valid tokens",
        "sqrt_all": "the square root of all tokens",
        "sqrt_mean": "the square root of the tokens",
        "other": "a count that is none of the known ones",
    }.get(name or "other", str(name))


def _span(weights: tuple[Weights, ...]) -> str:
    return ", ".join(f"{w.valid} of {w.tokens} valid" for w in weights[:3])
