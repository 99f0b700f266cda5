"""The judgement on a run: CE between neighbours, one movement per watched number, and the finding that matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zloss.decide.drift.ce_changes import CrossEntropies, still_steps
from zloss.decide.drift.limits import DriftLimits
from zloss.decide.drift.movement import judge_movement
from zloss.decide.drift.watched import SHIFT_KEYS, WATCHED
from zloss.decide.drift.watched_values import watched_values
from zloss.errors import InputError
from zloss.results.drift import CeChange, DriftCheckpoint, KeptCheckpoint, Movement
from zloss.results.quantities import symbol

LEAST_CHECKPOINTS = 2


@dataclass(frozen=True)
class DriftJudgement:
    """What drift.json says beside the numbers."""

    ce_changes: tuple[CeChange, ...]
    movements: tuple[Movement, ...]
    finding: str
    began: int | None


def judge_drift(kept: Sequence[KeptCheckpoint], limits: DriftLimits | None = None) -> DriftJudgement:
    """Judge finished checkpoints, given in the order of their steps."""
    limits = limits or DriftLimits()
    if len(kept) < LEAST_CHECKPOINTS:
        raise InputError(f"`checkpoints` is expected to name at least two checkpoints, but got {len(kept)}.")
    if any(each.tokens != kept[0].tokens or each.blocks.tokens != kept[0].blocks.tokens for each in kept):
        raise InputError("`checkpoints` are expected to be measured on the same tokens, but their blocks differ.")
    checkpoints: list[DriftCheckpoint] = [each.checkpoint for each in kept]
    blocks = tuple(each.blocks for each in kept)
    ce = CrossEntropies(tuple(each.step for each in checkpoints), blocks, limits.ce_tolerance)
    reach = ce.reach()
    movements = tuple(
        judge_movement(watched, watched_values(watched, checkpoints, blocks), ce, reach, limits) for watched in WATCHED
    )
    invisible = [movement for movement in movements if movement.state == "invisible"]
    return DriftJudgement(
        ce_changes=ce.neighbours(),
        movements=movements,
        finding=finding(movements, ce_stood_still=still_steps(reach)),
        began=invisible[0].began if invisible else None,
    )


def finding(movements: Sequence[Movement], *, ce_stood_still: bool) -> str:
    """What matters, in a few sentences."""
    invisible = [movement for movement in movements if movement.state == "invisible"]
    if not invisible:
        return _quiet(movements, ce_stood_still=ce_stood_still)
    lead, *others = invisible
    sentences = [f"Drift that CE cannot see: {lead.reason}"]
    shift = lead.quantity in SHIFT_KEYS
    if shift:
        centered = [movement for movement in invisible if movement.coordinate == "centered"]
        sentences.append(
            "The centered head moved too, so it is more than a common shift."
            if centered
            else "No number of the centered head moved with it: it is a common shift of all logits, "
            "which `zloss center` removes from a checkpoint and a penalty on μ holds in training."
        )
    if others:
        sentences.append(f"Also while CE stood still: {', '.join(_named(movement) for movement in others)}.")
    return " ".join(sentences)


def _quiet(movements: Sequence[Movement], *, ce_stood_still: bool) -> str:
    with_ce = [movement for movement in movements if movement.state == "with_ce"]
    if ce_stood_still:
        text = "No drift that CE cannot see: no watched number moved while CE stood still."
    else:
        text = "CE moved between every two neighbouring checkpoints, so no change happened while it stood still."
    if with_ce:
        text += f" Moved while CE moved: {', '.join(_named(movement) for movement in with_ce)}."
        if any(movement.quantity in SHIFT_KEYS for movement in with_ce):
            text += " Softmax does not depend on μ, so CE does not show that part of it at any step."
    return text


def _named(movement: Movement) -> str:
    where = "" if movement.quantity in SHIFT_KEYS else f"{movement.coordinate} "
    if movement.before is None or movement.after is None:
        return f"{where}{symbol(movement.quantity)}"
    return f"{where}{symbol(movement.quantity)} {movement.before:.4g} → {movement.after:.4g}"
