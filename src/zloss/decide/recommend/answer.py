"""From selection and confirmation to the answer and how sure it is.

The first row that applies:

| selection | confirmation | answer | level |
|---|---|---|---|
| no stage of the checkpoint fired | does not decide | no Z-loss | direction only; confirmed here if the arm is rejected |
| the chosen arm passes | it is accepted | the arm | confirmed here |
| the chosen arm passes | it passes, inconclusive | the arm | direction only |
| anything else | Centered head passes | Centered head | confirmed here if it is accepted, else direction only |
| the chosen arm passes | it does not pass | none: keep what one has | undecided |
| no arm passes | the nearest arm passes | none: keep what one has | undecided |
| no arm passes | the nearest arm is rejected | no Z-loss | confirmed here |
| no arm passes | the nearest arm does not pass, inconclusive | no Z-loss | direction only |
| every arm was stopped early | – | no Z-loss | direction only |

Centered head is a second choice only where the source stage fired: it trains as CE does, so it costs no further run.
"""

from __future__ import annotations

from dataclasses import dataclass

from zloss.decide.recommend.candidates import CE, CENTERED_HEAD
from zloss.decide.recommend.judged_arm import JudgedArm
from zloss.results.recommendation import Level

CONFIRMED: Level = "confirmed here"
DIRECTION: Level = "direction only"
UNDECIDED: Level = "undecided"


@dataclass(frozen=True)
class Answer:
    """What to use and how sure; `method` None means to keep what one has."""

    level: Level
    method: str | None
    coef: float | None
    why: str


def decide_answer(
    chosen: JudgedArm | None,
    confirmed: JudgedArm | None,
    centered_head: JudgedArm | None,
    *,
    diagnosed: bool,
    stopped: int = 0,
) -> Answer:
    """`chosen` is judged by selection, the other two by confirmation; `diagnosed`: a stage of the checkpoint fired.

    `centered_head` is None where the source stage did not fire. `stopped`: arms that ended early.
    """
    if not diagnosed:
        rejected = confirmed is not None and confirmed.verdict.verdict == "rejected"
        why = "No stage of the checkpoint fired: there is no shift, tail or gain that a Z-loss should lower."
        return Answer(CONFIRMED if rejected else DIRECTION, CE, 0.0, why)
    if chosen is None and not stopped:
        return Answer(UNDECIDED, None, None, "No run of an arm was finished, so nothing is decided.")
    if chosen is None:
        why = f"Every arm ({stopped}) was stopped on the first seed, because its rejection was certain."
        if centered_head is not None and centered_head.passes:
            found = _confirmed(centered_head)
            return Answer(found.level, found.method, found.coef, f"{found.why} {why}")
        return Answer(DIRECTION, CE, 0.0, why)
    if confirmed is None:
        return Answer(UNDECIDED, None, None, f"No further seed confirms {chosen.verdict.label}.")
    if chosen.passes and confirmed.passes:
        return _confirmed(confirmed)
    if centered_head is not None and centered_head.passes and centered_head.key != chosen.key:
        found = _confirmed(centered_head)
        return Answer(found.level, found.method, found.coef, f"{found.why} {_refused(chosen, confirmed)}")
    if chosen.passes or confirmed.passes:
        said = confirmed.objection or "it passes"
        why = f"Selection and confirmation disagree on {chosen.verdict.label}; on confirmation: {said}."
        return Answer(UNDECIDED, None, None, why)
    level = CONFIRMED if confirmed.verdict.verdict == "rejected" else DIRECTION
    return Answer(level, CE, 0.0, _refused(chosen, confirmed))


def _confirmed(arm: JudgedArm) -> Answer:
    method, coef = arm.key
    level = CONFIRMED if arm.verdict.verdict == "accepted" else DIRECTION
    parts = () if arm.verdict.parts is None else arm.verdict.parts.named()
    said = " ".join(f"{name[0].upper()}{name[1:]} {part.state}: {part.reason}" for name, part in parts)
    name = "Centered head" if method == CENTERED_HEAD else arm.verdict.label
    return Answer(level, method, coef, f"{name} on confirmation: {said}")


def _refused(chosen: JudgedArm, confirmed: JudgedArm) -> str:
    nearest = "The chosen arm" if chosen.passes else "No arm passed selection; the nearest,"
    return (
        f"{nearest} {confirmed.verdict.label}, did not pass confirmation: {confirmed.objection or 'selection said no'}."
    )
