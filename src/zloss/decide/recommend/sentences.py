"""The words of a recommendation: the action, what it costs, and what it does not promise."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.decide.recommend.candidates import CE, CENTERED_HEAD
from zloss.results.comparison import Comparison
from zloss.results.decision import Decision
from zloss.results.recommendation import NOT_TESTED

KEEP = "Keep what you have: the runs did not decide."
ACTIONS = {
    CE: "Use no Z-loss: train with plain cross-entropy.",
    CENTERED_HEAD: "Deploy the row-centered head and use no Z-loss.",
    "standard": "Train with Standard Z-loss on raw logits, λ = {coef:g}, c = log V.",
    "centered": "Train with Centered Z-loss, λ = {coef:g}, c = log V; its coordinate is the row-centered head.",
    "factorized": "Train with Factorized Z-loss, λ_μ = λ_rel = {coef:g}, c_μ = 0, c_rel = log V.",
    "gain-aware": "Train with Gain-aware Z-loss, λ = {coef:g}, β = 0.01, c = log V.",
}


def action(method: str | None, coef: float | None) -> str:
    """What to do, in one sentence."""
    if method is None:
        return KEEP
    return ACTIONS.get(method, f"Train with {method}, λ = {{coef:g}}.").format(coef=coef)


def costs(
    comparison: Comparison | None,
    method: str | None,
    coef: float | None,
    *,
    seconds_ratio: float | None,
    extra_bytes: int,
) -> tuple[str, ...]:
    """What the answer costs: quality, gradient, time, memory. `seconds_ratio`: time of a step over that of CE."""
    if method is None or method == CE:
        return ("Nothing changes.",)
    found = []
    if comparison is not None:
        own = next((m for m in comparison.methods if (m.method, m.coef) == (method, coef)), None)
        verdict = next((v for v in comparison.quality.methods if (v.method, v.coef) == (method, coef)), None)
        quality = None if verdict is None or verdict.parts is None else verdict.parts.quality
        if quality is not None:
            found.append(f"Quality: {quality.reason}")
        r_aux = None if own is None else own.mean("r_aux")
        if r_aux:
            found.append(f"Gradient: that of the Z-loss at the head is {r_aux:.1%} of that of CE after training.")
    if method == CENTERED_HEAD:
        found.append("Training: none; the head is centered once.")
        if extra_bytes:
            found.append(f"Memory: a tied head is untied, {extra_bytes / 1e6:.0f} MB more in fp32.")
    elif seconds_ratio is not None:
        found.append(f"Time: a step took {seconds_ratio:.2f} × that of CE here, by the clock (median over steps).")
    return tuple(found)


def promises(decisions: Sequence[Decision], proposed_by: Sequence[str], *, fresh_adam: bool) -> tuple[str, ...]:
    """What is not guaranteed: by the stages that proposed the answer, by the setting, and in general."""
    found = [f"{each.stage}: {each.not_guaranteed}." for each in decisions if each.stage in proposed_by]
    if fresh_adam:
        found.append("The runs began with a fresh Adam; a run that goes on with its own state may answer otherwise.")
    return (*found, f"{NOT_TESTED[0].upper()}{NOT_TESTED[1:]}.")
