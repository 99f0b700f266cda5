"""What evaluating one stage gives, before it is joined with the stage's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zloss.decide.stages import Stage
from zloss.results.decision import Decision, Effect


@dataclass(frozen=True)
class StageOutcome:
    """The measured number, its threshold, and the verdict in one sentence."""

    value: float | None
    threshold: float | None
    fired: bool | None
    """None: not evaluated."""
    reason: str
    measured: tuple[Effect, ...] = ()
    """What the stage's action would change."""
    action: str = ""
    """What to do about what was found; empty for the stage's own action."""


def unevaluated(stage: Stage, why: str = "") -> StageOutcome:
    """No verdict, with the reason and the command that would give one."""
    because = f"{why[0].upper()}{why[1:]}. " if why else ""
    commands = ", then ".join(f"`{command}`" for command in stage.commands)
    return StageOutcome(None, None, None, f"{because}To evaluate this stage: {commands}.")


def not_of_this_model(stage: Stage, why: str, needed: str) -> StageOutcome:
    """No verdict for this model; the commands are for a model that has what the stage reads, named by `needed`."""
    commands = ", then ".join(f"`{command}`" for command in stage.commands)
    sentence = f"{why[0].upper()}{why[1:]}. To evaluate this stage for a model that has {needed}: {commands}."
    return StageOutcome(None, None, None, sentence)


def without_verdict(stage: Stage, why: str) -> StageOutcome:
    """No verdict, and no command that would give one: what the stage reads does not exist for this model."""
    commands = " and ".join(f"`{command}`" for command in stage.commands)
    return StageOutcome(None, None, None, f"{why[0].upper()}{why[1:]}; {commands} cannot evaluate this stage here.")


def joined_sentence(parts: Sequence[str]) -> str:
    """Phrases as one sentence."""
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def decision(stage: Stage, outcome: StageOutcome) -> Decision:
    """The stage's text and its outcome as one record.

    Only a fired stage keeps its effects; one that changes nothing is left out unless its note says why.
    """
    moved = tuple(effect for effect in outcome.measured if effect.before != effect.after or effect.note)
    return Decision(
        stage=stage.name,
        risk=stage.risk,
        trigger=stage.trigger,
        value=outcome.value,
        threshold=outcome.threshold,
        fired=outcome.fired,
        reason=outcome.reason,
        action=outcome.action if outcome.fired and outcome.action else stage.action,
        expected=stage.expected,
        not_guaranteed=stage.not_guaranteed,
        evidence=stage.evidence,
        threshold_name=stage.threshold_name,
        measured=moved if outcome.fired else (),
    )
