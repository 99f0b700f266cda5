"""From a model and a text to a plan: load, time a few steps, audit, propose arms, see what the budget has room for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from zloss.decide.recommend.candidates import CE, candidates, with_references
from zloss.decide.recommend.time_plan import LEAST_STEPS, Speed, TimePlan, check_budget, plan_time, rounded_duration
from zloss.errors import InputError
from zloss.models.checkpoint import Checkpoint, load_checkpoint, model_fingerprint
from zloss.objectives import make_objective
from zloss.protocol.recommend.config import RecommendConfig
from zloss.protocol.recommend.kept_audits import kept_audit
from zloss.protocol.recommend.memory import check_files_fit, check_training_fits
from zloss.protocol.recommend.paste import code
from zloss.protocol.recommend.probe import RunCost, probe_cost
from zloss.protocol.recommend.session import Session
from zloss.results.audit import AuditReport
from zloss.results.files import read_record, write_record
from zloss.results.recommend_plan import FILE, Arm, LeftOut, RecommendPlan
from zloss.text import make_blocks, open_corpus
from zloss.train.start.optimizer_state import read_adam_state
from zloss.train.start.run_start import Start

NO_ROOM = "the budget has no room for it"
IMPLEMENTATION_STEPS = 20
"""The implementation audit costs about as much as these passes over one block, forward and backward."""
CE_ARM = Arm(CE, 0.0, (), "the baseline")


@dataclass(frozen=True)
class Prepared:
    """Everything that the runs need."""

    start: Start
    identity: str
    report: AuditReport
    plan: RecommendPlan


def check_inputs(config: RecommendConfig) -> None:
    """What can be refused before a model is loaded: texts, state of Adam, memory."""
    open_corpus(config.texts, config.corpus, config.text_field)
    if config.valid_texts:
        open_corpus(config.valid_texts, None, config.text_field)
    if config.optimizer_state is not None:
        read_adam_state(config.optimizer_state)
    check_files_fit(config.model)


def prepare(session: Session, *, timed: bool = True) -> Prepared:
    """The plan in `session.folder`, or a new one; without `timed` nothing is timed and every candidate is an arm."""
    config = session.config
    check_inputs(config)
    with session.progress.step(f"loading {Path(config.model).name[-30:]}", None):
        start = session.crew.load(config.train_config(CE_ARM, config.seeds[0], config.steps or LEAST_STEPS))
        check_training_fits(start.checkpoint)
        weights = model_fingerprint(start.checkpoint)
    texts = f"{start.data.train.fingerprint()} {start.data.valid.fingerprint()}"
    identity = config.fingerprint(f"{weights} {texts}")
    before = _plan_before(session, identity)
    if before is not None and before.request == config.request and (before.step_seconds is not None or not timed):
        session.say("going on with the plan from before")
        return Prepared(start, identity, audit_model(session, start.checkpoint), before)
    cost: RunCost | None = None
    steps = config.steps or (None if before is None else before.steps)
    if timed:
        first = config.train_config(CE_ARM, config.seeds[0], steps or LEAST_STEPS)
        cost = probe_cost(first, start, session.folder, session.progress, session.crew)
        expected = _audit_seconds(config, cost) + _implementation_seconds(config, cost)
        check_budget(config.budget_seconds, steps, _speed(session, cost, steps, expected))
        session.say(
            f"{cost.step:.2g} s per step of {config.micro_batch * config.accumulate * config.block_size} tokens; "
            f"audit: about {rounded_duration(_audit_seconds(config, cost))}"
        )
    report = audit_model(session, start.checkpoint)
    session.stopwatch.save()
    found = candidates(report)[: config.max_arms]
    if cost is None:
        arms, asked = with_references(found), steps or LEAST_STEPS
        time_plan = TimePlan(arms, (), config.seeds, asked, 0.0)
    else:
        speed = _speed(session, cost, steps, _implementation_seconds(config, cost))
        time_plan = plan_time(found, config.seeds, speed, budget=config.budget_seconds, steps=steps)
    plan = _plan(config, identity, start, time_plan, cost)
    write_record(session.folder / FILE, plan)
    return Prepared(start, identity, report, plan)


def audit_model(session: Session, checkpoint: Checkpoint) -> AuditReport:
    """The audit with its decisions, made once."""
    config = session.config
    blocks = make_blocks(
        open_corpus(config.texts, config.corpus, config.text_field),
        checkpoint.tokenizer,
        size=config.block_size,
        count=config.audit_blocks,
        bos_id=checkpoint.bos_id(config.bos),
    )
    return kept_audit(
        config.audit_config(),
        checkpoint,
        session.folder,
        identity=f"{model_fingerprint(checkpoint)} {blocks.fingerprint()}",
        thresholds=session.thresholds,
        progress=session.progress,
        command=session.command,
        crew=session.crew,
    )


def load_model(session: Session) -> Checkpoint:
    """The model alone, where the runs were made elsewhere."""
    with session.progress.step(f"loading {Path(session.config.model).name[-30:]}", None):
        return load_checkpoint(session.config.model, allow_pickle=None)


def _plan_before(session: Session, identity: str) -> RecommendPlan | None:
    """The plan in the folder; one of other settings is refused, a damaged one is made anew."""
    file = session.folder / FILE
    if not file.is_file():
        return None
    try:
        found = read_record(file, RecommendPlan)
    except InputError:
        return None
    if found.identity != identity:
        raise InputError(
            f"{session.folder} holds a recommendation of another model, text or training: choose another folder, or "
            "remove that one."
        )
    return found


def _speed(session: Session, cost: RunCost, steps: int | None, remaining: float) -> Speed:
    beside = cost.beside_steps(steps or LEAST_STEPS, session.config.valid_blocks)
    return Speed(cost.step, beside, session.stopwatch.seconds + remaining)


def _audit_seconds(config: RecommendConfig, cost: RunCost) -> float:
    """A pass over the text, and four gradients on eight blocks."""
    return config.audit_blocks * cost.valid_block + 2 * 8 * cost.step / (config.micro_batch * config.accumulate)


def _implementation_seconds(config: RecommendConfig, cost: RunCost) -> float:
    return IMPLEMENTATION_STEPS * cost.step / (config.micro_batch * config.accumulate)


def _plan(
    config: RecommendConfig, identity: str, start: Start, time_plan: TimePlan, cost: RunCost | None
) -> RecommendPlan:
    arms = [replace(arm, code=code(make_objective(arm.method, arm.coef))) for arm in (CE_ARM, *time_plan.arms)]
    steps = time_plan.steps
    return RecommendPlan(
        identity=identity,
        model=Path(config.model).name,
        text=start.data.identity.train.name,
        arms=tuple(arms),
        left_out=tuple(LeftOut(arm.method, arm.coef, NO_ROOM) for arm in time_plan.left_out),
        seeds=time_plan.seeds,
        steps=steps,
        settings=config.settings(steps),
        request=config.request,
        checkpoint_every=steps if cost is None else cost.checkpoint_every(steps),
        budget_seconds=config.budget_seconds,
        seconds=None if cost is None else time_plan.seconds,
        step_seconds=None if cost is None else cost.step,
        run_seconds=None if cost is None else cost.beside_steps(steps, config.valid_blocks),
    )
