"""What evaluating one stage gives, before it is joined with the stage's text."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.decide.stages import Stage
from zloss.results.audit import Decision, Effect


@dataclass(frozen=True)
class Finding:
    """The number, what it was held against, and the verdict in one sentence."""

    value: float | None
    threshold: float | None
    fired: bool | None
    reason: str
    measured: tuple[Effect, ...] = ()


def unevaluated(stage: Stage, why: str = "") -> Finding:
    """No verdict: say why, and name the command that would give one."""
    because = f"{why[0].upper()}{why[1:]}. " if why else ""
    commands = ", then ".join(f"`{command}`" for command in stage.commands)
    return Finding(None, None, None, f"{because}To evaluate this stage: {commands}.")


def decision(stage: Stage, finding: Finding) -> Decision:
    """The stage's text and its finding as one record; effects belong to fired triggers only."""
    return Decision(
        stage=stage.name,
        risk=stage.risk,
        trigger=stage.trigger,
        value=finding.value,
        threshold=finding.threshold,
        fired=finding.fired,
        reason=finding.reason,
        action=stage.action,
        expected=stage.expected,
        not_guaranteed=stage.not_guaranteed,
        evidence=stage.evidence,
        threshold_name=stage.threshold_name,
        measured=finding.measured if finding.fired else (),
    )
