"""The diagnosed coordinate of a router loss: its scale relative to the token-layer mean, which is exact arithmetic."""

from __future__ import annotations

from zloss.results.verdict import VerdictPart


def judge_scale(s_rel: float | None, coef: float | None, tolerance: float) -> VerdictPart:
    """Holds if |s_rel − 1| ≤ tolerance; a failing scale comes with the λ_R that would have it."""
    if s_rel is None:
        return VerdictPart("open", "the runs hold no s_rel.")
    numbers = {"quantity": "s_rel", "s_rel": s_rel, "tolerance": tolerance}
    if abs(s_rel - 1) <= tolerance:
        return VerdictPart("holds", f"s_rel = {s_rel:.4g}: the scale of the token-layer mean.", numbers)
    match = f"; λ_R = {coef / s_rel:.4g} would have it" if s_rel and coef else ""
    return VerdictPart("fails", f"s_rel = {s_rel:.4g} is not the scale of the token-layer mean{match}.", numbers)
