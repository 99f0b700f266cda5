"""The fired actions in the order in which to take them, and one sentence that says where to begin."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.decide import stages
from zloss.results.decision import Decision

BECAUSE = {
    stages.IMPLEMENTATION: "every other number rests on the loss that is really applied",
    stages.ROUTER: "λ_R has no meaning before its scale is known",
    stages.QUALITY: "no gain in geometry is worth a worse language model",
    stages.SOURCE: "it changes neither softmax nor CE, and the stages below read other numbers after it",
    stages.DECOMPOSITION: "one λ acts on two coordinates",
    stages.TRANSPORT: "the head amplifies what the source injects",
    stages.PATHWAY: "the tied table receives more than the output loss shows",
    stages.OPTIMIZER: "it is a consequence: it is measured again after the actions upstream",
}
"""Stage → why its action stands where it does; the order is that of the actions."""
ORDER = tuple(stage.name for stage in BECAUSE)


def ordered_actions(decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """The fired decisions in the order in which to act on them."""
    fired = [decision for decision in decisions if decision.fired]
    return tuple(sorted(fired, key=lambda decision: ORDER.index(decision.stage) if decision.stage in ORDER else 99))


def bottom_line(decisions: Sequence[Decision]) -> str:
    """ "First …, because …; then …"; "Nothing to do" where no stage fired."""
    actions = ordered_actions(decisions)
    unevaluated = [decision.stage for decision in decisions if decision.fired is None]
    if not actions:
        if len(unevaluated) == len(decisions):
            return "Nothing is decided: no stage was evaluated."
        rest = f"; not evaluated: {', '.join(unevaluated)}" if unevaluated else ""
        return f"Nothing to do: {len(decisions) - len(unevaluated)} stages were evaluated and none fired{rest}."
    first, *others = actions
    because = {stage.name: why for stage, why in BECAUSE.items()}.get(first.stage, first.risk)
    text = f"First: {_small(first.action)} ({first.stage}), because {because}."
    if others:
        text += " Then, measured again each time: " + ", ".join(decision.stage for decision in others) + "."
    return text


def _small(text: str) -> str:
    """The action inside a sentence; an initial that is a name (R_Z, λ) stays."""
    return text[0].lower() + text[1:] if text[1:2].islower() else text
