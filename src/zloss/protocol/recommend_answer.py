"""What was tried on one model, and the recommendation made of it: the answer, its cost, the arms, and the lines to paste."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zloss.decide.decision_map import decide
from zloss.decide.recommend import (
    MOST_CONFIRMING,
    ON_CHECKPOINT,
    Answer,
    EvaluatedArm,
    choose,
    costs,
    decide_answer,
    evaluate_arms,
    nothing_calls_for_it,
    with_verdict,
)
from zloss.decide.stages import SOURCE, inside
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict import CE, CENTERED_HEAD
from zloss.head.source import explain
from zloss.objectives import CenteredHead, StandardZLoss, make_objective
from zloss.protocol.config import RecommendConfig
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison, Verdict
from zloss.results.decision import Decision
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.provenance import Provenance, without_folders
from zloss.results.recommendation import PASSES, Arm, ArmResult, Paste, Recommendation, Tested
from zloss.results.router import RouterScaleTable
from zloss.results.run_config import MU_CENTERING, MU_LOSS
from zloss.train.finished import FinishedRun

SHOWN = ("Liger", "flash-attn", "t5x / MaxText", "Megatron-LM")
HEAD_LOSS_NOTE = (
    "hidden [B, N, D] before the head, labels [B, N] already shifted; −100 is ignored; mean over valid tokens"
)
HEAD_LOSS = """\
import zloss

objective = {code}
out = zloss.head_loss(hidden, model.lm_head.weight, labels, objective)
out.loss.backward()  # out.cross_entropy and out.auxiliary for the log"""
ATTACH = """\
import zloss
from zloss.integrations.transformers import attach

attach(trainer, {code})
trainer.train()"""
OF_THE_MEAN_ROW = {
    MU_LOSS: (
        "zloss.mu_loss_(model.lm_head.weight, {coef:g})",
        "once per step, before clipping and `optimizer.step()`",
    ),
    MU_CENTERING: ("zloss.mu_center_(model.lm_head.weight)", "after every `optimizer.step()`"),
}
"""Line and note of the methods on the mean row."""
ATTACH_NOTE = "loss and telemetry of a Trainer; `apply(model, objective)` for any other loop"


@dataclass(frozen=True)
class Trials:
    """Everything that was tried on one model: the record that the answer and the page are made of."""

    report: AuditReport
    """The audit of the checkpoint, with its decisions."""
    tested: Tested
    arms: tuple[Arm, ...]
    """Arms with a run on the first seed, without CE."""
    selection: Comparison
    """The first seed on the selecting half of the validation text."""
    selection_seed: int
    others: tuple[ArmResult, ...] = ()
    """Arms without a finished run: those that ended early, then those that the budget had no room for."""
    confirmation: Comparison | None = None
    """CE, Centered head and the chosen arm on the other seeds and the confirming half."""
    confirming: tuple[FinishedRun, ...] = ()
    """The runs of that comparison."""
    notes: tuple[str, ...] = ()

    @cached_property
    def evaluated(self) -> tuple[EvaluatedArm, ...]:
        """Every arm of the selection, Centered head included."""
        return evaluate_arms(self.selection)

    @property
    def carried(self) -> EvaluatedArm | None:
        """The arm that goes to confirmation: the best that passes, else the nearest."""
        return choose(self.evaluated, centered_head=self.shift_matters)

    @property
    def shift_matters(self) -> bool:
        """Whether the source stage fired and is not known to be harmless, so that Centered head is an answer."""
        (source,) = (each for each in self.report.decisions if each.stage == SOURCE.name)
        return bool(source.fired) and (source.consequence is None or source.consequence.matters is not False)

    @cached_property
    def confirmed(self) -> dict[tuple[str, float], EvaluatedArm]:
        """The arms that reached confirmation, with its results."""
        found = () if self.confirmation is None else evaluate_arms(self.confirmation)
        trained = {run.key for run in self.confirming}
        return {
            arm.key: arm for arm in found if arm.key in trained or (self.shift_matters and arm.key[0] == CENTERED_HEAD)
        }

    def answer(self) -> Answer:
        """What selection and confirmation decide."""
        carried = self.carried
        return decide_answer(
            carried,
            None if carried is None else self.confirmed.get(carried.key),
            self.confirmed.get((CENTERED_HEAD, 0.0)),
            diagnosed=any(each.fired for each in self.report.decisions if each.stage in ON_CHECKPOINT),
            stopped=sum(arm.state == "stopped" for arm in self.others),
        )


def make_recommendation(
    trials: Trials,
    config: RecommendConfig,
    *,
    implementation: ImplementationAudit,
    routers: Sequence[RouterScaleTable],
    thresholds: Thresholds,
    seconds: float,
    provenance: Provenance,
    earlier: Recommendation | None = None,
) -> Recommendation:
    """The record; all eight stages are evaluated from everything that was measured. `earlier`: the answer that the folder has."""
    answer, report, comparison = trials.answer(), trials.report, trials.confirmation or trials.selection
    decisions = decide(
        report,
        comparisons=(comparison,),
        implementation_audits=(implementation,),
        routers=routers,
        thresholds=thresholds,
    )
    key = None if answer.method is None or answer.coef is None else (answer.method, answer.coef)
    proposed_by = next((arm.stages for arm in trials.arms if arm.key == key), ())
    if key == (CENTERED_HEAD, 0.0):
        proposed_by = (SOURCE.name,)
    fired = [_fired(each) for each in decisions if each.fired and each.stage in proposed_by]
    seeds, notes = tuple(dict.fromkeys(run.seed for run in trials.confirming)), list[str]()
    # Median time of a step in the confirming runs, where it was measured.
    of_arm, of_ce = (
        [step.seconds for run in trials.confirming if run.key == wanted for step in run.steps if step.seconds]
        for wanted in (key, (CE, 0.0))
    )
    if config.runs:
        notes.append("the runs were made by another trainer; their settings are in their config.json")
    if config.precision == "fp16":
        notes.append("the runs were in fp32; logits stored in fp16 and the fp16 margin were audited")
    notes += trials.notes
    if len(seeds) == 1 and answer.method != CE:
        notes.append(
            "one confirming seed shows no spread over seeds, so nothing can be confirmed: use three seeds or more"
        )
    vocab, model = report.model.valid_vocab or report.model.vocab, without_folders(config.model)
    made = Recommendation(
        action="",
        objective=answer.method,
        coef=answer.coef,
        level=answer.level,
        confidence="",
        why=(*answer.why, *fired),
        cost=costs(
            comparison,
            answer.method,
            answer.coef,
            seconds_ratio=statistics.median(of_arm) / statistics.median(of_ce) if of_arm and of_ce else None,
            extra_bytes=4 * report.model.vocab * report.model.width if report.model.tied else 0,
        ),
        not_guaranteed=tuple(
            f"{each.stage}: {each.not_guaranteed}." for each in decisions if each.stage in proposed_by
        ),
        stages=decisions,
        paste=()
        if key in (None, (CE, 0.0))
        else paste_lines(*key, vocab=vocab, model=model, tied=report.model.tied, trainer=config.of_a_trainer),
        tested=trials.tested,
        arms=_arm_results(trials),
        confirmation=tuple(map(confirming_verdict, trials.confirmed.values())),
        selection_seed=trials.selection_seed,
        confirmation_seeds=seeds,
        tolerance_ppl=comparison.quality.tolerance_ppl,
        budget_seconds=config.budget_seconds if not config.runs else None,
        seconds=seconds,
        notes=tuple(notes),
        provenance=provenance,
        added_seeds=added_seeds(seeds, earlier) or None,
    )
    return with_verdict(made)


def added_seeds(seeds: Sequence[int], earlier: Recommendation | None) -> tuple[int, ...]:
    """The confirming seeds that an earlier answer of the same folder did not have, and those that it had added itself."""
    if earlier is None or not earlier.confirmation_seeds:
        return ()
    before = set(earlier.confirmation_seeds) - set(earlier.added_seeds or ())
    return tuple(seed for seed in seeds if seed not in before) if before & set(seeds) else ()


def _fired(decision: Decision) -> str:
    """Why the stage proposed an arm; one that fired and does not matter is harmless, as in the decision map."""
    consequence = decision.consequence
    if consequence is not None and consequence.matters is False:
        return f"{decision.stage} fired, but is harmless here: {inside(consequence.reason)}"
    return f"{decision.stage} fired: {decision.reason}"


def confirming_verdict(arm: EvaluatedArm) -> Verdict:
    """The verdict of an arm, which is never accepted where the arm does not pass."""
    if arm.outcome == arm.verdict.verdict:
        return arm.verdict
    reasons = (f"It does not pass: {arm.objection}.", *(arm.verdict.reasons or ()))
    return replace(
        arm.verdict, verdict=arm.outcome, accepted=None, reason=f"{arm.outcome}: {arm.objection}", reasons=reasons
    )


def _arm_results(trials: Trials) -> tuple[ArmResult, ...]:
    """What selection and confirmation say of every candidate: first the arms that were evaluated."""
    proposed, results = {arm.key: arm for arm in trials.arms}, []
    for found in trials.evaluated:
        arm, confirmed = proposed.get(found.key), trials.confirmed.get(found.key)
        results.append(
            ArmResult(
                *found.key,
                state="passed" if found.passes else "not passed",
                stages=() if arm is None else arm.stages,
                reason=found.objection or PASSES,
                note="read from the runs of CE" if arm is None else arm.note,
                delta_ce=found.delta_ce,
                ratio=found.ratio,
                transported=found.transported,
                steps=trials.selection.steps,
                confirmed=None if confirmed is None else confirmed.outcome,
            )
        )
    return (*results, *trials.others)


# What to do next


AUDIT_LOSS = "zloss audit-loss MODULE:FUNCTION"
REPLACED = ("seeds", "out", "budget", "steps", "methods", "max-arms")
"""Options of the command that a repetition with more seeds sets itself."""


def next_command(found: Recommendation, config: RecommendConfig, argv: Sequence[str], out: str) -> tuple[str, str]:
    """(the command that follows from the answer, what to do and learn with it).

    `argv` is the command line after `zloss`, `out` the folder of the answer.

    An undecided answer is repeated in a new folder, on fresh seeds whose number is set beforehand, for the arm in question
    alone: seeds that are added after an answer was seen favor good answers.
    """
    action = None if found.verdict is None else found.verdict.action
    if action == "center":
        return _center_command(config.model), "write the centered copy, and compare it with the original"
    if action == "train" and not nothing_calls_for_it(found):
        why = "train with the lines above, then check that the loss applies the λ, c and denominator they state"
        return AUDIT_LOSS, why
    if action in ("train", "nothing"):
        return AUDIT_LOSS, (
            "keep training as you do. If you already use a Z-loss, check that it applies the λ, c and denominator that you "
            "believe it does"
        )
    if config.runs:
        return shlex.join(["zloss", *argv]), "record runs of more seeds with your trainer, then repeat this command"
    carried = next((arm for arm in found.arms if arm.confirmed is not None and arm.method != CENTERED_HEAD), None)
    verdict = next((one for one in found.confirmation if carried and one.method == carried.method), None)
    parts = [] if verdict is None or verdict.parts is None else [part for _, part in verdict.parts.named()]
    numbers = [one for part in parts if part.state == "open" for one in part.numbers.get("questions") or [part.numbers]]
    used = (found.selection_seed or 0, *found.confirmation_seeds)
    wanted = max((one["seeds_to_settle"] for one in numbers if one.get("seeds_to_settle")), default=len(used))
    fresh = range(max(used) + 1, max(used) + 2 + min(max(wanted, 2), MOST_CONFIRMING))
    words = ["zloss", *_kept_words(argv)]
    if carried is not None:
        method = f"{carried.method}:{carried.coef:g}" if carried.coef else carried.method
        words += ["--methods", method, "--max-arms", "1"]
    words += [] if found.tested.steps is None else ["--steps", str(found.tested.steps)]
    words += ["--seeds", ",".join(map(str, fresh)), "--out", f"{out.rstrip('/')}-2"]
    why = "decide on more seeds, fresh ones in a new folder, whose number does not depend on this answer"
    return shlex.join(words), why


def _kept_words(argv: Sequence[str]) -> list[str]:
    """The command line without the replaced options, each of which takes a value, and without `--force`."""
    kept, words = list[str](), iter(argv)
    for word in words:
        name, equals, _ = word.removeprefix("--").replace("_", "-").partition("=")
        if word.startswith("--") and name in REPLACED:
            if not equals:
                next(words, "")
        elif word != "--force":
            kept.append(word)
    return kept


# Lines to paste


def paste_lines(
    method: str, coef: float, *, vocab: int, model: str, tied: bool = True, trainer: bool = False
) -> tuple[Paste, ...]:
    """How this objective is written in each stack, for a head of `vocab` rows; for a checkpoint of a `trainer`, its lines first.

    Other frameworks are given by their settings; where the objective has none, λ(log Z)² of raw logits is the nearest.
    """
    code = method_code(method, coef)
    if method in OF_THE_MEAN_ROW:
        return (Paste("plain loop", code, f"training stays on plain CE; {OF_THE_MEAN_ROW[method][1]}"),)
    objective = make_objective(method, coef)
    if isinstance(objective, CenteredHead):
        lines = f"{_center_command(model)}  # a checkpoint folder, from the command line"
        if not tied:
            lines += "\nzloss.center_head_(model.lm_head, model=model)  # or in place"
        found = [Paste("any stack", lines, "training stays on plain CE; softmax and PPL do not change")]
    else:
        found = [
            Paste("plain loop", HEAD_LOSS.format(code=code), HEAD_LOSS_NOTE),
            Paste("transformers", ATTACH.format(code=code), ATTACH_NOTE),
        ]
        found = found[::-1] if trainer else found
    nearest = explain(StandardZLoss(coef, target=0.0), vocab=vocab) if coef else None
    for recipe in explain(objective, vocab=vocab).recipes:
        if recipe.framework in SHOWN and recipe.setting is not None:
            found.append(Paste(recipe.framework, recipe.setting, recipe.note))
        elif recipe.framework in SHOWN:
            near = None if nearest is None else nearest[recipe.framework].setting
            found.append(Paste(recipe.framework, near or "", f"cannot be expressed: {recipe.note}", exact=False))
    return tuple(found)


def method_code(method: str, coef: float) -> str:
    """The objective, or the call of a method on the mean row, as a Python expression.

    >>> method_code("standard", 1e-4), method_code("mu-loss", 1e-4)
    ('zloss.StandardZLoss(coef=0.0001)', 'zloss.mu_loss_(model.lm_head.weight, 0.0001)')
    """
    if method in OF_THE_MEAN_ROW:
        return OF_THE_MEAN_ROW[method][0].format(coef=coef)
    made = repr(make_objective(method, coef))
    return "zloss." + re.sub(r", (target=None|relative_target=None|shift_target=0\.0)", "", made)


def with_model_as_given(pastes: Sequence[Paste], recorded: str, given: str) -> tuple[Paste, ...]:
    """The lines with the model as the user gave it: a record has no folders, so its line works only next to the model."""
    old, new = _center_command(recorded), _center_command(given)
    return tuple(replace(paste, lines=paste.lines.replace(old, new)) for paste in pastes)


def _center_command(model: str) -> str:
    return f"zloss center {shlex.quote(model)} --out centered"
