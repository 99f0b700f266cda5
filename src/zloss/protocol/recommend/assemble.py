"""The record of a recommendation from the outcome of its runs and its audits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from zloss.decide import stages
from zloss.decide.decision_map import decide
from zloss.decide.recommend.answer import UNDECIDED, Answer, decide_answer
from zloss.decide.recommend.candidates import CE, CENTERED_HEAD
from zloss.decide.recommend.judged_arm import JudgedArm, judge_arms
from zloss.decide.recommend.sentences import action, costs, promises
from zloss.protocol.recommend.experiment import Outcome, source_fired
from zloss.protocol.recommend.paste import paste_lines
from zloss.protocol.recommend.session import Session
from zloss.results.audit import AuditReport
from zloss.results.decision import Decision
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.named_path import without_folders
from zloss.results.provenance import Provenance, shared_keys
from zloss.results.recommend_plan import Arm, LeftOut
from zloss.results.recommendation import ArmResult, ArmState, Recommendation, Tested
from zloss.results.router_scale import RouterScaleTable
from zloss.train.compare.finished_run import FinishedRun

ON_CHECKPOINT = tuple(stage.name for stage in (stages.SOURCE, stages.DECOMPOSITION, stages.TRANSPORT, stages.PATHWAY))


@dataclass(frozen=True)
class Evidence:
    """Everything that a record is made of."""

    report: AuditReport
    outcome: Outcome
    implementation: ImplementationAudit | None
    routers: tuple[RouterScaleTable, ...]
    left_out: tuple[LeftOut, ...]
    """Candidates that the plan had no room for."""
    tested: Tested
    notes: tuple[str, ...]
    started: datetime


def answer_of(report: AuditReport, outcome: Outcome) -> Answer:
    """What selection and confirmation decide."""
    confirmed = {} if outcome.confirmation is None else {arm.key: arm for arm in judge_arms(outcome.confirmation)}
    chosen = outcome.chosen
    return decide_answer(
        chosen,
        None if chosen is None else confirmed.get(chosen.key),
        confirmed.get((CENTERED_HEAD, 0.0)) if source_fired(report) else None,
        diagnosed=any(each.fired for each in report.decisions if each.stage in ON_CHECKPOINT),
        stopped=len(outcome.stopped),
    )


def assemble(session: Session, evidence: Evidence) -> Recommendation:
    """The record; all eight stages are evaluated from everything that was measured."""
    report, outcome, config = evidence.report, evidence.outcome, session.config
    answer = answer_of(report, outcome)
    comparison = outcome.confirmation or outcome.selection
    decisions = decide(
        report,
        comparisons=() if comparison is None else (comparison,),
        implementation_audits=() if evidence.implementation is None else (evidence.implementation,),
        routers=evidence.routers,
        thresholds=session.thresholds,
    )
    key = None if answer.method is None or answer.coef is None else (answer.method, answer.coef)
    tied_bytes = 4 * report.model.vocab * report.model.width if report.model.tied else 0
    vocab, model = report.model.valid_vocab or report.model.vocab, without_folders(config.model)
    return Recommendation(
        action=action(answer.method, answer.coef),
        objective=answer.method,
        coef=answer.coef,
        level=answer.level,
        confidence=f"{answer.level}: {evidence.tested.sentence}",
        why=(answer.why, *_fired(decisions)),
        cost=costs(
            outcome.confirmation,
            answer.method,
            answer.coef,
            seconds_ratio=None if key is None else _seconds_ratio(outcome.runs, key),
            extra_bytes=tied_bytes,
        ),
        not_guaranteed=promises(decisions, _proposed_by(outcome.arms, key), fresh_adam=config.optimizer_state is None),
        stages=decisions,
        paste=() if key is None else paste_lines(*key, vocab=vocab, model=model),
        tested=evidence.tested,
        arms=_arm_results(outcome, evidence.left_out),
        confirmation=() if outcome.confirmation is None else outcome.confirmation.quality.methods,
        selection_seed=outcome.seeds[0] if outcome.seeds else None,
        confirmation_seeds=outcome.seeds[1:],
        tolerance_ppl=None if comparison is None else comparison.quality.tolerance_ppl,
        budget_seconds=config.budget_seconds if not config.runs else None,
        seconds=session.stopwatch.seconds,
        notes=(*evidence.notes, *outcome.notes, *_few_seeds(outcome, answer)),
        provenance=Provenance(**shared_keys(session.command, evidence.started, session.stopwatch.seconds)),
    )


def _fired(decisions: Sequence[Decision]) -> tuple[str, ...]:
    """What was diagnosed at the start, as reasons."""
    return tuple(
        f"{each.stage} fired: {each.reason}" for each in decisions if each.fired and each.stage in ON_CHECKPOINT
    )


def _proposed_by(arms: Sequence[Arm], key: tuple[str, float] | None) -> tuple[str, ...]:
    if key == (CENTERED_HEAD, 0.0):
        return (stages.SOURCE.name,)
    return next((arm.stages for arm in arms if arm.key == key), ())


def _few_seeds(outcome: Outcome, answer: Answer) -> tuple[str, ...]:
    if len(outcome.seeds) == 2 and answer.method != CE:
        return (
            "one confirming seed has no spread over seeds, so nothing can be confirmed: give three seeds and the time for them",
        )
    return ("undecided means: keep what you have",) if answer.level == UNDECIDED else ()


def _seconds_ratio(runs: Sequence[FinishedRun], key: tuple[str, float]) -> float | None:
    """Median time of a step of the arm over that of CE."""
    both = []
    for wanted in (key, (CE, 0.0)):
        seconds = [step.seconds for run in runs if run.key == wanted for step in run.steps if step.seconds]
        both.append(statistics.median(seconds) if seconds else None)
    own, base = both
    return own / base if own and base else None


def _arm_results(outcome: Outcome, left_out: Sequence[LeftOut]) -> tuple[ArmResult, ...]:
    judged = {arm.key: arm for arm in outcome.judged}
    proposed = {arm.key: arm for arm in outcome.arms}
    found = [_judged_result(arm, proposed.get(key), outcome) for key, arm in judged.items()]
    for key, stopped in outcome.stopped.items():
        arm = proposed[key]
        reason = f"its rejection was certain: {stopped.reason}"
        found.append(ArmResult(arm.method, arm.coef, "stopped", arm.stages, reason, arm.note, steps=stopped.step))
    for arm, reason in outcome.left_out:
        found.append(ArmResult(arm.method, arm.coef, "left out", arm.stages, reason, arm.note))
    found += [ArmResult(one.method, one.coef, "left out", (), one.reason) for one in left_out]
    return tuple(found)


def _judged_result(arm: JudgedArm, proposed: Arm | None, outcome: Outcome) -> ArmResult:
    chosen = outcome.chosen is not None and arm.key == outcome.chosen.key
    state: ArmState = "chosen" if chosen else "passed" if arm.passes else "failed"
    method, coef = arm.key
    return ArmResult(
        method=method,
        coef=coef,
        state=state,
        stages=() if proposed is None else proposed.stages,
        reason=arm.objection or "passes selection",
        note="read from the runs of CE" if proposed is None else proposed.note,
        delta_ce=arm.delta_ce,
        ratio=arm.ratio,
        transported=arm.transported,
        steps=None if outcome.selection is None else outcome.selection.steps,
    )
