"""The whole protocol on one model: audit, arms, selection, confirmation, implementation, router, answer."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from zloss.console import Progress, Silent
from zloss.decide.recommend.judged_arm import judge_arms
from zloss.decide.recommend.time_plan import rounded_duration
from zloss.decide.thresholds import Thresholds
from zloss.models.checkpoint import Checkpoint
from zloss.protocol.recommend.assemble import Evidence, answer_of, assemble
from zloss.protocol.recommend.config import RecommendConfig
from zloss.protocol.recommend.crew import Crew
from zloss.protocol.recommend.experiment import Experiment, Outcome, choose, compared, source_fired
from zloss.protocol.recommend.kept_audits import kept_implementation_audit
from zloss.protocol.recommend.own_runs import OwnRuns, read_own_runs
from zloss.protocol.recommend.prepare import CE_ARM, audit_model, check_inputs, load_model, prepare
from zloss.protocol.recommend.session import Session
from zloss.protocol.recommend.stopwatch import Stopwatch
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.files import write_record
from zloss.results.folder import check_folder
from zloss.results.folder_owner import Owner, refuse_other, text_name
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.recommend_plan import Arm, RecommendPlan
from zloss.results.recommendation import Recommendation, Tested
from zloss.results.router_scale import RouterScaleTable
from zloss.router.conventions import find_convention, router_scale_table
from zloss.train.step.live import LiveView, NoView

CONFIRMATION_FILE = Path("confirmation") / "comparison.json"
SELECTION_FILE = Path("selection") / "comparison.json"


def run_recommendation(
    config: RecommendConfig,
    folder: Path,
    *,
    thresholds: Thresholds | None = None,
    force: bool = False,
    progress: Progress | None = None,
    view: LiveView | None = None,
    say: Callable[[str], None] = lambda text: None,
    command: str = "zloss.protocol.recommend.run.run_recommendation",
    crew: Crew | None = None,
) -> Recommendation:
    """The record. Audits and finished runs are kept in `folder`, so the same call goes on after an interruption.

    `force`: replace the result of something else that `folder` holds. `crew`: this process as the first of several; the
    others are in `Crew.follow`.
    What can be refused is refused before the first model is loaded; too small a budget, after a few timed steps.
    """
    session = _session(config, folder, thresholds, progress, view, say, command, crew)
    started = datetime.now(UTC)
    if config.router_convention is not None:
        find_convention(config.router_convention)
    own = read_own_runs(config.runs, config.seeds) if config.runs else None
    text = text_name(config.texts, config.corpus) if own is None else _text_of(own.ce[0].config)
    refuse_other(folder, Owner("recommendation", config.model, text), force=force)
    if own is not None:
        return _from_own_runs(session, own, started)
    prepared = prepare(session)
    say(plan_sentence(prepared.plan))
    outcome = Experiment(session, prepared).run()
    _keep(session, outcome)
    plan = prepared.plan
    tested = Tested(
        model=plan.model,
        text=plan.text,
        lr=config.lr,
        steps=plan.steps,
        tokens=plan.steps * config.micro_batch * config.accumulate * config.block_size,
    )
    return _finish(session, prepared.start.checkpoint, prepared.report, outcome, tested, plan, started)


def make_plan(
    config: RecommendConfig,
    folder: Path,
    *,
    thresholds: Thresholds | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    command: str = "zloss.protocol.recommend.run.make_plan",
    crew: Crew | None = None,
) -> RecommendPlan:
    """Audit and arms alone, as settings for a trainer of one's own; nothing is trained."""
    return prepare(_session(config, folder, thresholds, progress, None, say, command, crew), timed=False).plan


def plan_sentence(plan: RecommendPlan) -> str:
    """What will be run, and how long it is expected to take."""
    names = ", ".join(arm.label for arm in plan.arms)
    time = "" if plan.seconds is None else f"; about {rounded_duration(plan.seconds)} in all"
    of = "" if plan.budget_seconds is None else f" of {rounded_duration(plan.budget_seconds)}"
    out = f"; left out: {', '.join(f'{one.method} {one.coef:g}' for one in plan.left_out)}" if plan.left_out else ""
    seeds = ", ".join(map(str, plan.seeds[1:]))
    return f"{names}, {plan.steps} steps each, on seed {plan.seeds[0]}; the chosen one and ce on {seeds}{time}{of}{out}"


def _session(
    config: RecommendConfig,
    folder: Path,
    thresholds: Thresholds | None,
    progress: Progress | None,
    view: LiveView | None,
    say: Callable[[str], None],
    command: str,
    crew: Crew | None,
) -> Session:
    check_folder(folder)
    return Session(
        config,
        folder,
        Stopwatch(folder),
        thresholds or Thresholds(),
        progress or Silent(),
        view or NoView(),
        say,
        crew or Crew(),
        command,
    )


def _from_own_runs(session: Session, own: OwnRuns, started: datetime) -> Recommendation:
    config = session.config
    check_inputs(config)
    selection = compared(session, [run for run in (*own.ce, *own.runs) if run.seed == own.seeds[0]], "selection")
    checkpoint = load_model(session)
    report = audit_model(session, checkpoint)
    outcome = _own_outcome(session, own, selection, report)
    _keep(session, outcome)
    first = own.ce[0]
    tested = Tested(
        model=Path(config.model).name,
        text=_text_of(first.config),
        lr=_number(first.config.get("lr", (first.config.get("settings") or {}).get("lr"))),
        steps=first.record.training.steps,
        tokens=first.record.tokens_consumed,
    )
    return _finish(session, checkpoint, report, outcome, tested, None, started, notes=_own_notes(own))


def _own_outcome(session: Session, own: OwnRuns, selection: Comparison, report: AuditReport) -> Outcome:
    judged = judge_arms(selection)
    chosen = choose(judged, centered_head=source_fired(report))
    wanted = {CE_ARM.key} if chosen is None else {CE_ARM.key, chosen.key, ("standard", chosen.key[1])}
    confirming = [run for run in (*own.ce, *own.runs) if run.seed in own.seeds[1:] and run.key in wanted]
    confirmation = compared(session, confirming, "confirmation") if confirming else None
    return Outcome(own.arms, selection, judged, chosen, confirmation, tuple(confirming), own.seeds)


def _own_notes(own: OwnRuns) -> tuple[str, ...]:
    notes = ["the runs were made by a trainer of one's own; their settings are in their config.json"]
    if own.unfinished:
        notes.append(f"unfinished and left out: {', '.join(own.unfinished)}")
    return tuple(notes)


def _finish(
    session: Session,
    checkpoint: Checkpoint,
    report: AuditReport,
    outcome: Outcome,
    tested: Tested,
    plan: RecommendPlan | None,
    started: datetime,
    notes: tuple[str, ...] = (),
) -> Recommendation:
    """Implementation and router stage, then the record."""
    config = session.config
    answer = answer_of(report, outcome)
    session.say("implementation audit")
    chosen = Arm(answer.method or CE_ARM.method, answer.coef or 0.0)
    if not chosen.coef and outcome.chosen is not None:
        chosen = Arm(*outcome.chosen.key)
    implementation: ImplementationAudit = kept_implementation_audit(
        config.implementation_config(chosen),
        checkpoint,
        session.folder,
        identity=f"{tested.model} {tested.text} {report.provenance.extra.get('identity')}",
        progress=session.progress,
        command=session.command,
    )
    session.stopwatch.save()
    said = list(notes)
    if config.optimizer_state is None and not config.runs:
        said.append("Adam started fresh in every run")
    if config.precision == "fp16":
        said.append("the runs were in fp32; logits stored in fp16 and the fp16 margin were audited")
    evidence = Evidence(
        report=report,
        outcome=outcome,
        implementation=implementation,
        routers=_routers(config, report),
        left_out=() if plan is None else plan.left_out,
        tested=tested,
        notes=tuple(said),
        started=started,
    )
    return assemble(session, evidence)


def _routers(config: RecommendConfig, report: AuditReport) -> tuple[RouterScaleTable, ...]:
    """The stated router loss of a model with routers."""
    if report.router is None or config.router_convention is None:
        return ()
    convention = find_convention(config.router_convention).name
    tokens = config.micro_batch * config.accumulate * config.block_size
    context = {"layers": report.router.layers, "top_k": report.router.top_k, "tokens": tokens}
    return (router_scale_table(config.router_coef, convention, **context, model_layers=report.router.model_layers),)


def _keep(session: Session, outcome: Outcome) -> None:
    """The comparisons behind the answer, as `zloss report` reads them."""
    for file, comparison in ((SELECTION_FILE, outcome.selection), (CONFIRMATION_FILE, outcome.confirmation)):
        if comparison is not None:
            write_record(session.folder / file, comparison)


def _text_of(config: dict[str, object]) -> str:
    data = config.get("data")
    train = data.get("train") if isinstance(data, dict) else None
    name = train.get("name") if isinstance(train, dict) else None
    return str(name) if name else "an unnamed text"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
