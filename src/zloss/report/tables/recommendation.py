"""Arms, confirmation and paste lines of a recommendation as lines of tables."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.decide.recommend.candidates import CENTERED_HEAD
from zloss.decide.stages import SOURCE
from zloss.report.text.numbers import number
from zloss.results.quality import QualityVerdict
from zloss.results.recommendation import Recommendation

ARM_TITLES = ("arm", "state", "ΔCE", "lowered", "p99 ‖δ_u‖", "steps")


@dataclass(frozen=True)
class ArmLine:
    """One candidate."""

    cells: tuple[str, ...]
    """Under `ARM_TITLES`."""
    state: str
    reason: str
    note: str
    stages: str


def arm_lines(found: Recommendation) -> list[ArmLine]:
    """A line per arm, in the order of the record."""
    return [
        ArmLine(
            cells=(
                arm.label,
                arm.state,
                "" if arm.delta_ce is None else f"{arm.delta_ce:+.4f}",
                _ratio(arm.ratio),
                _ratio(arm.transported),
                number(arm.steps) if arm.steps is not None else "",
            ),
            state=arm.state,
            reason=arm.reason,
            note=arm.note,
            stages=", ".join(arm.stages),
        )
        for arm in found.arms
    ]


def confirmation_lines(found: Recommendation) -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    """(method, verdict, its parts as (name, state, sentence)) of every confirmed method."""
    return [(each.label, each.verdict or "not judged", _parts(each)) for each in found.confirmation]


def seeds_sentence(found: Recommendation) -> str:
    """Which seed selected and which confirmed."""
    if found.selection_seed is None:
        return "No run was made."
    seeds = ", ".join(map(str, found.confirmation_seeds)) or "none"
    word = "seeds" if len(found.confirmation_seeds) > 1 else "seed"
    return (
        f"Seed {found.selection_seed} and half of the validation text selected; {word} {seeds} and the other half were for "
        "confirmation. Numbers of the selection are not evidence: it chose by them. The chosen arm is the best that passed, or "
        f"the nearest where none did.{_unproposed_head(found)}"
    )


def _unproposed_head(found: Recommendation) -> str:
    """Why a Centered head that passes is not the answer: it is measured for every model, and proposed for some."""
    source = next((stage for stage in found.stages if stage.stage == SOURCE.name), None)
    passed = any(arm.method == CENTERED_HEAD and arm.state == "passed" for arm in found.arms)
    if not passed or source is None or source.fired:
        return ""
    return f" {CENTERED_HEAD} is proposed only where {SOURCE.name} fired."


def _parts(verdict: QualityVerdict) -> list[tuple[str, str, str]]:
    named = () if verdict.parts is None else verdict.parts.named()
    return [(name, part.state, part.reason) for name, part in named]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"× {value:.3g}"
