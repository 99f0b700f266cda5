"""What was tried on one model, and the recommendation made of it: the answer, its cost, the arms, and the lines to paste."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from zloss.decide.decision_map import decide
from zloss.decide.recommend import (
    CE,
    CENTERED_HEAD,
    UNDECIDED,
    Answer,
    EvaluatedArm,
    action,
    choose,
    costs,
    decide_answer,
    evaluate_arms,
    not_guaranteed,
)
from zloss.decide.stages import DECOMPOSITION, PATHWAY, SOURCE, TRANSPORT
from zloss.decide.thresholds import Thresholds
from zloss.head.source import explain
from zloss.objectives import CenteredHead, Objective, StandardZLoss, make_objective
from zloss.protocol.config import RecommendConfig
from zloss.protocol.recommend_runs import StoppedRun, objective_code
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.provenance import Provenance, without_folders
from zloss.results.recommendation import Arm, ArmResult, ArmState, Paste, Recommendation, Tested
from zloss.results.router import RouterScaleTable

ON_CHECKPOINT = tuple(stage.name for stage in (SOURCE, DECOMPOSITION, TRANSPORT, PATHWAY))
SHOWN = ("Liger", "flash-attn", "t5x / MaxText", "Megatron-LM")
HEAD_LOSS_NOTE = (
    "hidden [B, N, D] before the head, labels [B, N] already shifted; −100 is ignored; mean over valid tokens"
)
ArmKey = tuple[str, float]


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
    stopped: Mapping[ArmKey, StoppedRun] = field(default_factory=dict)
    """Arms that ended early."""
    left_out: tuple[ArmResult, ...] = ()
    """Arms without a run, because the budget had no room for them."""
    confirmation: Comparison | None = None
    """CE, Centered head and the chosen arm on the other seeds and the confirming half."""
    confirmation_seeds: tuple[int, ...] = ()
    step_seconds: Mapping[ArmKey, float] = field(default_factory=dict)
    """Median time of a step in the confirming runs."""
    notes: tuple[str, ...] = ()

    @cached_property
    def evaluated(self) -> tuple[EvaluatedArm, ...]:
        """Every arm of the selection, Centered head included."""
        return evaluate_arms(self.selection)

    @property
    def chosen(self) -> EvaluatedArm | None:
        """The arm that is confirmed; one that does not pass is the nearest."""
        return choose(self.evaluated, centered_head=self.shift_diagnosed)

    @property
    def shift_diagnosed(self) -> bool:
        """Whether the source stage fired, so that Centered head is an answer."""
        return any(decision.fired for decision in self.report.decisions if decision.stage == SOURCE.name)

    def answer(self) -> Answer:
        """What selection and confirmation decide."""
        confirmed = {} if self.confirmation is None else {arm.key: arm for arm in evaluate_arms(self.confirmation)}
        chosen = self.chosen
        return decide_answer(
            chosen,
            None if chosen is None else confirmed.get(chosen.key),
            confirmed.get((CENTERED_HEAD, 0.0)) if self.shift_diagnosed else None,
            diagnosed=any(each.fired for each in self.report.decisions if each.stage in ON_CHECKPOINT),
            stopped=len(self.stopped),
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
) -> Recommendation:
    """The record; all eight stages are evaluated from everything that was measured."""
    answer, report, confirmation = trials.answer(), trials.report, trials.confirmation
    comparison = confirmation or trials.selection
    decisions = decide(
        report,
        comparisons=(comparison,),
        implementation_audits=(implementation,),
        routers=routers,
        thresholds=thresholds,
    )
    fired = [f"{each.stage} fired: {each.reason}" for each in decisions if each.fired and each.stage in ON_CHECKPOINT]
    key = None if answer.method is None or answer.coef is None else (answer.method, answer.coef)
    vocab, model = report.model.valid_vocab or report.model.vocab, without_folders(config.model)
    return Recommendation(
        action=action(answer.method, answer.coef),
        objective=answer.method,
        coef=answer.coef,
        level=answer.level,
        confidence=f"{answer.level}: {trials.tested.sentence}",
        why=(answer.why, *fired),
        cost=costs(
            confirmation,
            answer.method,
            answer.coef,
            seconds_ratio=_seconds_ratio(trials, key),
            extra_bytes=4 * report.model.vocab * report.model.width if report.model.tied else 0,
        ),
        not_guaranteed=not_guaranteed(
            decisions, _proposed_by(trials.arms, key), fresh_adam=config.optimizer_state is None
        ),
        stages=decisions,
        paste=() if key is None else paste_lines(*key, vocab=vocab, model=model),
        tested=trials.tested,
        arms=_arm_results(trials),
        confirmation=() if confirmation is None else confirmation.quality.methods,
        selection_seed=trials.selection_seed,
        confirmation_seeds=trials.confirmation_seeds,
        tolerance_ppl=comparison.quality.tolerance_ppl,
        budget_seconds=config.budget_seconds if not config.runs else None,
        seconds=seconds,
        notes=(*trials.notes, *_few_seeds(trials, answer)),
        provenance=provenance,
    )


def _seconds_ratio(trials: Trials, key: ArmKey | None) -> float | None:
    """Time of a step of the arm over that of CE."""
    arm, base = (None if wanted is None else trials.step_seconds.get(wanted) for wanted in (key, (CE, 0.0)))
    return arm / base if arm and base else None


def _proposed_by(arms: Sequence[Arm], key: ArmKey | None) -> tuple[str, ...]:
    if key == (CENTERED_HEAD, 0.0):
        return (SOURCE.name,)
    return next((arm.stages for arm in arms if arm.key == key), ())


def _few_seeds(trials: Trials, answer: Answer) -> tuple[str, ...]:
    if len(trials.confirmation_seeds) == 1 and answer.method != CE:
        return (
            "one confirming seed has no spread over seeds, so nothing can be confirmed: give three seeds and the time for them",
        )
    return ("undecided means: keep what you have",) if answer.level == UNDECIDED else ()


def _arm_results(trials: Trials) -> tuple[ArmResult, ...]:
    """What selection said of every candidate: arms that were evaluated, then stopped ones, then those without a run."""
    proposed, chosen = {arm.key: arm for arm in trials.arms}, trials.chosen
    results = []
    for found in trials.evaluated:
        is_chosen = chosen is not None and found.key == chosen.key
        state: ArmState = "chosen" if is_chosen else "passed" if found.passes else "failed"
        arm = proposed.get(found.key) or Arm(*found.key, (), "read from the runs of CE")
        results.append(
            ArmResult(
                *(arm.method, arm.coef, state, arm.stages, found.objection or "passes selection", arm.note),
                delta_ce=found.delta_ce,
                ratio=found.ratio,
                transported=found.transported,
                steps=trials.selection.steps,
            )
        )
    for key, stopped in trials.stopped.items():
        arm, reason = proposed[key], f"its rejection was certain: {stopped.reason}"
        results.append(ArmResult(arm.method, arm.coef, "stopped", arm.stages, reason, arm.note, steps=stopped.step))
    return (*results, *trials.left_out)


# Lines to paste


def paste_lines(method: str, coef: float, *, vocab: int, model: str) -> tuple[Paste, ...]:
    """How this objective is written in each stack, for a head of `vocab` rows."""
    objective = make_objective(method, coef)
    own = [_centering(model)] if isinstance(objective, CenteredHead) else [_plain(objective), _transformers(objective)]
    return (*own, *_frameworks(objective, coef, vocab))


def with_model_as_given(pastes: Sequence[Paste], recorded: str, given: str) -> tuple[Paste, ...]:
    """The lines with the model as the user gave it: a record names no folders, so its line finds the model only next to it."""
    old, new = _center_command(recorded), _center_command(given)
    return tuple(replace(paste, lines=paste.lines.replace(old, new)) for paste in pastes)


def _plain(objective: Objective) -> Paste:
    if not objective.active:
        return Paste("plain loop", "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())", "no Z in the loss")
    lines = (
        "import zloss\n\n"
        f"objective = {objective_code(objective)}\n"
        "out = zloss.head_loss(hidden, model.lm_head.weight, labels, objective)\n"
        "out.loss.backward()  # out.cross_entropy and out.auxiliary for the log"
    )
    return Paste("plain loop", lines, HEAD_LOSS_NOTE)


def _transformers(objective: Objective) -> Paste:
    if not objective.active:
        return Paste("transformers", "trainer.train()", "the model's own loss is CE")
    lines = (
        "import zloss\nfrom zloss.integrations.transformers import attach\n\n"
        f"attach(trainer, {objective_code(objective)})\n"
        "trainer.train()"
    )
    return Paste("transformers", lines, "loss and telemetry of a Trainer; `apply(model, objective)` for any other loop")


def _centering(model: str) -> Paste:
    lines = (
        f"{_center_command(model)}  # a checkpoint folder, from the command line\n"
        "zloss.center_head_(model.lm_head)  # or in place, on an untied head"
    )
    return Paste("any stack", lines, "training stays on plain CE; softmax and PPL do not change")


def _center_command(model: str) -> str:
    return f"zloss center {shlex.quote(model)} --out centered"


def _frameworks(objective: Objective, coef: float, vocab: int) -> list[Paste]:
    """Their own settings; where the objective has none, λ(log Z)² of raw logits is the nearest."""
    nearest = explain(StandardZLoss(coef, target=0.0), vocab=vocab) if coef else None
    found = []
    for recipe in explain(objective, vocab=vocab).recipes:
        if recipe.framework not in SHOWN:
            continue
        if recipe.setting is not None:
            found.append(Paste(recipe.framework, recipe.setting, recipe.note))
            continue
        near = None if nearest is None else nearest[recipe.framework].setting
        found.append(Paste(recipe.framework, near or "", f"cannot be expressed: {recipe.note}", exact=False))
    return found
