"""What evaluating one stage gives, before it is joined with the stage's text."""

from __future__ import annotations

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


def unevaluated(stage: Stage, why: str = "") -> StageOutcome:
    """No verdict, with the reason and the command that would give one."""
    because = f"{why[0].upper()}{why[1:]}. " if why else ""
    commands = ", then ".join(f"`{command}`" for command in stage.commands)
    return StageOutcome(None, None, None, f"{because}To evaluate this stage: {commands}.")


def decision(stage: Stage, outcome: StageOutcome) -> Decision:
    """The stage's text and its outcome as one record; only a fired stage keeps its effects."""
    return Decision(
        stage=stage.name,
        risk=stage.risk,
        trigger=stage.trigger,
        value=outcome.value,
        threshold=outcome.threshold,
        fired=outcome.fired,
        reason=outcome.reason,
        action=stage.action,
        expected=stage.expected,
        not_guaranteed=stage.not_guaranteed,
        evidence=stage.evidence,
        threshold_name=stage.threshold_name,
        measured=outcome.measured if outcome.fired else (),
    )
