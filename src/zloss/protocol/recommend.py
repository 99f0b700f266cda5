"""The whole protocol on one model: audit, arms, selection, confirmation, implementation, router, answer.

All processes of a job run this program. What depends on the clock or on files is decided by the first one and sent to the
others (`Job.from_first`); the audit and the runs divide their blocks over all of them. One module above 500 lines, because it is
one program, in the order of its work.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from zloss import __version__
from zloss.audit.checkpoint.run import run_audit_of
from zloss.audit.implementation.run import run_implementation_audit
from zloss.console import Progress, Silent
from zloss.decide.decision_map import with_decisions
from zloss.decide.recommend import (
    CE_ARM,
    LEAST_STEPS,
    RunKey,
    certain_rejection,
    confirming_runs,
    evaluate_arms,
    extra_seeds,
    named_arms,
    plan_time,
    rounded_duration,
    with_references,
)
from zloss.decide.stages import signed
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict import CENTERED_HEAD, GAIN_AWARE, STANDARD
from zloss.errors import InputError, UnknownNameError
from zloss.jobs import Job
from zloss.models.checkpoint import Checkpoint, load_checkpoint, model_fingerprint
from zloss.protocol.config import RecommendConfig
from zloss.protocol.recommend_answer import Trials, make_recommendation
from zloss.protocol.recommend_runs import (
    NO_ROOM,
    STOPPED_FILE,
    Half,
    RunCost,
    audit_seconds,
    check_files_fit,
    check_training_fits,
    compare_on_half,
    implementation_seconds,
    kept_run,
    plan_runs,
    plan_sentence,
    probe_cost,
    read_recorded_runs,
    speed_of,
    stopped_arm,
)
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.files import read_record
from zloss.results.folder import Owner, check_folder, refuse_other, text_name
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.io import write_json
from zloss.results.provenance import Provenance, shared_keys
from zloss.results.recommendation import PLAN_FILE, Arm, ArmResult, Recommendation, RecommendPlan, Tested
from zloss.results.router import RouterScaleTable
from zloss.results.run_config import TrainConfig
from zloss.results.steps import StepRecord
from zloss.router.conventions import find_convention, router_scale_table
from zloss.text import make_blocks, open_corpus
from zloss.train.finished import FinishedRun, read_run
from zloss.train.folder import is_finished, remove_checkpoints
from zloss.train.live import LiveView, NoView
from zloss.train.loss import method_names, run_loss
from zloss.train.options import RunOptions
from zloss.train.run import RunEndedError, run_training
from zloss.train.start import Start, prepare_start, read_adam_state

RUNS_FOLDER = "runs"
AUDIT_FILE = Path("audit") / "report.json"
TIME_FILE = ".spent.json"
SAVE_TIME_EVERY = 15.0
"""Seconds of training between two records of the time spent; a killed command loses at most these."""
IDENTITY = "identity"
BF16_LOGITS = "bf16 logits in deployment (those of the runs, which stage 5 audits, are fp32)"
Kept = TypeVar("Kept", AuditReport, ImplementationAudit)


def run_recommendation(
    config: RecommendConfig,
    folder: Path,
    *,
    thresholds: Thresholds | None = None,
    force: bool = False,
    progress: Progress | None = None,
    view: LiveView | None = None,
    say: Callable[[str], None] = lambda text: None,
    command: str = "zloss.protocol.recommend.run_recommendation",
    job: Job | None = None,
) -> Recommendation:
    """The record. Audits and finished runs are kept in `folder`, so the same call resumes after an interruption.

    `force`: replace the results of a different experiment in `folder`. `job`: this process among several, all of which make
    this call and return the same record.
    Bad input is rejected before the first model is loaded; too small a budget, after a few timed steps.
    """
    work = _Work(config, folder, job, thresholds, progress, view, say, command)
    recorded = work.job.from_first(work.open, force=force)
    if recorded is not None:
        checkpoint, trials = work.compare_recorded_runs(*recorded)
    else:
        start = work.load()
        report, plan = work.plan(start)
        work.say(plan_sentence(plan))
        checkpoint, trials = start.checkpoint, work.run_arms(start, report, plan)
    return work.job.from_first(work.finish, checkpoint, trials)


def make_plan(
    config: RecommendConfig,
    folder: Path,
    *,
    thresholds: Thresholds | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    command: str = "zloss.protocol.recommend.make_plan",
    job: Job | None = None,
) -> RecommendPlan:
    """Audit and arms alone, as settings for another training loop; nothing is trained."""
    work = _Work(config, folder, job, thresholds, progress, None, say, command)
    work.job.from_first(work.check_inputs)
    return work.plan(work.load(), timed=False)[1]


class _Work:
    """One command on one folder, as every process of the job runs it."""

    def __init__(
        self,
        config: RecommendConfig,
        folder: Path,
        job: Job | None,
        thresholds: Thresholds | None,
        progress: Progress | None,
        view: LiveView | None,
        say: Callable[[str], None],
        command: str,
    ) -> None:
        self.config, self.folder, self.command, self.started = config, folder, command, datetime.now(UTC)
        self.job, self.thresholds = job or Job(), thresholds or Thresholds()
        self.progress, self.view = progress or Silent(), view or NoView()
        self.say = say if self.job.first else lambda text: None
        self._slowdowns = list[float]()
        self._began = self._time_saved = time.monotonic()
        self._seconds_before = 0.0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._seconds_before = float(json.loads((folder / TIME_FILE).read_text(encoding="utf-8"))["seconds"])

    @property
    def seconds(self) -> float:
        """Time spent in this folder, over all commands; time between them does not count."""
        return self._seconds_before + time.monotonic() - self._began

    def save_time(self) -> None:
        """Record the time spent."""
        self._time_saved = time.monotonic()
        write_json(self.folder / TIME_FILE, {"seconds": self.seconds})

    # Inputs

    def open(self, *, force: bool) -> tuple[list[FinishedRun], list[int], list[str]] | None:
        """Check what can be checked before a model is loaded; return the recorded runs if the settings name any."""
        config = self.config
        if config.router_convention is not None:
            find_convention(config.router_convention)
        recorded = read_recorded_runs(config.runs, config.seeds) if config.runs else None
        text = text_name(config.texts, config.corpus) if recorded is None else _text_of(recorded[0][0])
        refuse_other(self.folder, Owner("recommendation", config.model, text), force=force)
        self.check_inputs()
        return recorded

    def check_inputs(self) -> None:
        """Reject a folder, texts, a state of Adam or a size of the model that cannot be used."""
        config = self.config
        check_folder(self.folder)
        for arm in named_arms(config.methods):
            if arm.method not in method_names():
                raise UnknownNameError("method", arm.method, method_names())
        open_corpus(config.texts, config.corpus, config.text_field)
        if config.valid_texts:
            open_corpus(config.valid_texts, None, config.text_field)
        if config.optimizer_state is not None:
            read_adam_state(config.optimizer_state)
        check_files_fit(config.model)

    def load(self) -> Start:
        """Model and text of the runs."""
        config = self.config
        with self.progress.step(f"loading {Path(config.model).name[-30:]}", None):
            first = config.train_config(CE_ARM, config.seeds[0], config.steps or LEAST_STEPS)
            start = self.job.together(prepare_start, first)
            self.job.from_first(check_training_fits, start.checkpoint)
            for arm in named_arms(config.methods):  # rejected here if this model cannot be trained with it
                run_loss(replace(first, method=arm.method, coef=arm.coef), start.checkpoint, start.data.train)
        return start

    def audit(self, checkpoint: Checkpoint) -> AuditReport:
        """The audit with its decisions, made once; Ctrl-C during it ends the command."""
        config, job, file = self.config, self.job, self.folder / AUDIT_FILE

        def identity() -> str:
            corpus, bos = open_corpus(config.texts, config.corpus, config.text_field), checkpoint.bos_id(config.bos)
            count, tokenizer = config.audit_blocks, checkpoint.tokenizer
            blocks = make_blocks(corpus, tokenizer, size=config.block_size, count=count, bos_id=bos)
            return f"{model_fingerprint(checkpoint)} {blocks.fingerprint()} {config.audit_config()}"

        name = job.from_first(identity)
        report = job.from_first(_kept_record, file, AuditReport, name)
        if report is None:
            made = run_audit_of(
                job, config.audit_config(), checkpoint=checkpoint, progress=self.progress, command=self.command
            )
            report = job.from_first(_keep_record, file, None if made is None else made.report, name)
        return with_decisions(report, thresholds=self.thresholds)

    # Plan

    def plan(self, start: Start, *, timed: bool = True) -> tuple[AuditReport, RecommendPlan]:
        """The audit, and the plan in the folder or a new one; without `timed` every candidate is an arm.

        A new plan: time a few steps, audit, propose arms, see what the budget allows.
        """
        config, job = self.config, self.job
        identity, before = job.from_first(self._earlier_plan, start)
        if before is not None and before.request == config.request and (before.step_seconds is not None or not timed):
            self.say("resuming with the plan in the folder")
            return self.audit(start.checkpoint), before
        steps = config.steps or (None if before is None else before.steps)
        cost: RunCost | None = None
        kept = frozenset[RunKey]()
        if timed:
            kept = job.from_first(self._kept_runs, before)
            self._say_spent(kept)
            first = config.train_config(CE_ARM, config.seeds[0], steps or LEAST_STEPS)
            cost = probe_cost(job, first, start, self.folder, self.progress)
            job.from_first(self._check_budget, cost, steps, before, kept)
        report = self.audit(start.checkpoint)

        def new_plan() -> RecommendPlan:
            self.save_time()
            text = start.data.identity.train.name
            plan = plan_runs(
                config,
                report,
                cost,
                steps,
                spent=self.seconds,
                spent_before=self._seconds_before,
                kept=kept,
                identity=identity,
                text=text,
            )
            plan.write(self.folder / PLAN_FILE)
            return plan

        return report, job.from_first(new_plan)

    def _earlier_plan(self, start: Start) -> tuple[str, RecommendPlan | None]:
        """(identity of the runs, the plan in the folder); a plan with other settings is rejected, a damaged one is rewritten."""
        texts = f"{start.data.train.fingerprint()} {start.data.valid.fingerprint()}"
        identity = self.config.fingerprint(f"{model_fingerprint(start.checkpoint)} {texts}")
        try:
            found = read_record(self.folder / PLAN_FILE, RecommendPlan)
        except InputError:
            return identity, None
        if found.identity != identity:
            raise InputError(
                f"{self.folder} contains a recommendation for another model, text or training setup: choose another folder, or "
                "remove that one."
            )
        return identity, found

    def _kept_runs(self, before: RecommendPlan | None) -> frozenset[RunKey]:
        """The runs in the folder, finished or stopped early, that a new plan keeps."""
        if before is None:
            return frozenset()
        arms = {arm.key: arm for arm in (*before.arms, *named_arms(self.config.methods))}
        arms |= {(one.method, one.coef): Arm(one.method, one.coef) for one in before.left_out}
        return frozenset(
            (*arm.key, seed)
            for arm, seed in itertools.product(arms.values(), self.config.seeds)
            if is_finished(place := self._run_place(before, arm, seed)[1]) or stopped_arm(place, arm) is not None
        )

    def _say_spent(self, kept: Collection[RunKey]) -> None:
        """What earlier commands on this folder took, which counts towards the budget, and what it saves now."""
        if kept and self.config.budget_seconds is not None:
            spent, budget = rounded_duration(self._seconds_before), rounded_duration(self.config.budget_seconds)
            runs = f"{len(kept)} finished run{'s are' if len(kept) > 1 else ' is'} kept and cost{'' if len(kept) > 1 else 's'}"
            self.say(f"{spent} of the {budget} were already spent in this folder; {runs} no more time")

    def _check_budget(
        self, cost: RunCost, steps: int | None, before: RecommendPlan | None, kept: Collection[RunKey]
    ) -> None:
        """Reject a budget that has no room for one arm on two seeds, before the audit begins."""
        config, known = self.config, (self.folder / AUDIT_FILE).is_file()
        audit = 0.0 if known else audit_seconds(config, cost)
        speed = speed_of(config, cost, steps, self.seconds + audit, spent=self._seconds_before)
        arms = [Arm(STANDARD, 0.0)] if before is None else before.arms[1:2]
        plan_time(arms, config.seeds[:2], speed, budget=config.budget_seconds, steps=steps, kept=kept)
        took = "kept from before" if known else f"about {rounded_duration(audit)}"
        self.say(f"{cost.step:.2g} s per step of {config.tokens_per_step} tokens; audit: {took}")

    # Runs

    def run_arms(self, start: Start, report: AuditReport, plan: RecommendPlan) -> Trials:
        """Every arm on the first seed, then CE and the best one on the others, within the budget."""
        config, (seed, *further), arms = self.config, plan.seeds, plan.arms[1:]
        kept = self.job.from_first(self._kept_runs, plan)
        confirming = sum(confirming_runs(arms, one, kept) for one in further)
        left = [(*arm.key, seed) not in kept for arm in arms]
        baseline = self._run(start, plan, CE_ARM, seed, left=1 + sum(left) + confirming)
        assert isinstance(baseline, FinishedRun)
        runs, tried, stopped, left_out = [baseline], list[Arm](), list[ArmResult](), list[ArmResult]()
        for number, arm in enumerate(arms):
            if number and not self._has_room(plan, [arm], seed, confirming):
                self._say_left_out(plan, arm.label, f"its run and {confirming} of the confirmation", 1 + confirming)
                left_out.append(ArmResult(arm.method, arm.coef, "left out", arm.stages, NO_ROOM, arm.note))
                continue
            tried.append(arm)
            found = self._run(start, plan, arm, seed, left=sum(left[number:]) + confirming, baseline=baseline)
            if isinstance(found, ArmResult):
                stopped.append(found)
                self.say(f"{arm.label}: stopped at step {found.steps}, {found.reason}")
                continue
            runs.append(found)
            for one in evaluate_arms(self._compare(runs, "selection")):
                if one.key == arm.key:
                    numbers = ""
                    if one.delta_ce is not None and one.ratio is not None:
                        reference = "Standard" if arm.method == GAIN_AWARE else "CE"
                        numbers = f"ΔCE {signed(one.delta_ce)} nat, what it should lower is × {one.ratio:.3g} "
                        numbers += f"that of {reference}; "
                    self.say(f"{arm.label}: {numbers}{one.objection or 'passes so far'}")
        left_out += [ArmResult(one.method, one.coef, "left out", (), one.reason) for one in plan.left_out]
        tokens = plan.steps * config.tokens_per_step
        trials = Trials(
            report=report,
            tested=Tested(
                model=plan.model,
                text=plan.text,
                lr=config.training.lr,
                steps=plan.steps,
                tokens=tokens,
                known=config.training.known,
                assumed=(*config.training.assumed, *((BF16_LOGITS,) if config.precision == "fp32" else ())),
            ),
            arms=tuple(tried),
            selection=self._compare(runs, "selection"),
            selection_seed=seed,
            others=(*stopped, *left_out),
        )
        return self._confirm(start, plan, trials)

    def _confirm(self, start: Start, plan: RecommendPlan, trials: Trials) -> Trials:
        """The trials with the runs of the selected arm, its reference and CE on the remaining seeds.

        Time left after the planned seeds is spent on more seeds, up to five, regardless of their results: stopping at the
        first good answer would favor good answers.
        """
        carried, planned = trials.carried, plan.seeds[1:]
        if carried is None and not trials.shift_matters:
            return trials
        arms, notes = [CE_ARM], list(trials.notes)
        if carried is not None:
            word = "the best that passed" if carried.passes else "the nearest, though it did not pass"
            self.say(f"{carried.verdict.label}: {word} on seed {plan.seeds[0]}; now the confirming seeds")
            method, coef = carried.key
            # Centered head is read from the runs of CE; Gain-aware is compared with Standard.
            arms += with_references([Arm(method, coef)]) if method != CENTERED_HEAD else ()
        runs = list[FinishedRun]()
        further = (*planned, *(extra_seeds(plan.seeds) if plan.budget_seconds is not None else ()))
        for number, seed in enumerate(further):
            extra = number >= len(planned)
            if number and not self._has_room(plan, arms, seed):
                if extra:
                    break
                self._say_left_out(plan, f"seed {seed}", f"its {len(arms)} runs" if arms[1:] else "its run", len(arms))
                notes.append(f"the budget had no room for seed {seed}")
                continue
            if extra:
                self.say(f"seed {seed} confirms too, because there is time left")
            remaining = len(arms) * (1 if extra else len(planned) - number)
            for place, arm in enumerate(arms):
                found = self._run(start, plan, arm, seed, left=remaining - place)
                assert isinstance(found, FinishedRun)
                runs.append(found)
        confirmation = self._compare(runs, "confirmation") if runs else None
        return replace(trials, confirming=tuple(runs), confirmation=confirmation, notes=tuple(notes))

    def _run(
        self, start: Start, plan: RecommendPlan, arm: Arm, seed: int, *, left: int, baseline: FinishedRun | None = None
    ) -> FinishedRun | ArmResult:
        """One run, resumed or kept from before; `left` counts it and the runs after it.

        With a `baseline`, the CE run of the same seed, it ends as soon as its rejection is certain.
        """
        config, place = self._run_place(plan, arm, seed)
        found = self.job.from_first(kept_run, place, arm, config, start)
        if found is not None:
            self.say(f"{arm.label}, seed {seed}: kept from before")
        else:
            runs = f"{left} run{'s' if left != 1 else ''} left"
            self.say(f"{arm.label}, seed {seed}: {runs}, about {rounded_duration(left * self._run_seconds(plan))}")
            found = self._train(start, plan, arm, config, place, baseline)
        if isinstance(found, FinishedRun) and found.provenance is not None and plan.step_seconds:
            # Of all steps, those before an interruption included.
            self._slowdowns.append(found.provenance.train_seconds / (plan.steps * plan.step_seconds))
        return found

    def _train(
        self,
        start: Start,
        plan: RecommendPlan,
        arm: Arm,
        config: TrainConfig,
        place: Path,
        baseline: FinishedRun | None,
    ) -> FinishedRun | ArmResult:
        def ending(records: Sequence[StepRecord]) -> str | None:
            if time.monotonic() - self._time_saved > SAVE_TIME_EVERY:
                self.save_time()
            if baseline is None:
                return None
            return certain_rejection(
                records, baseline.metrics, steps=config.steps, spike=config.spike, thresholds=self.thresholds
            )

        stopped: dict[str, Any] = {}
        try:
            run_training(
                config,
                start,
                place,
                options=RunOptions(checkpoint_every=plan.checkpoint_every, command=self.command),
                view=self.view,
                progress=self.progress,
                job=self.job,
                ending=ending,
            )
        except RunEndedError as ended:
            stopped = {"step": ended.step, "reason": ended.reason}

        def result() -> FinishedRun | ArmResult | None:
            self.save_time()
            if stopped:
                write_json(place / STOPPED_FILE, stopped)
                remove_checkpoints(place)
            return stopped_arm(place, arm) if stopped else read_run(place)

        found = self.job.from_first(result)
        assert found is not None
        return found

    def _run_place(self, plan: RecommendPlan, arm: Arm, seed: int) -> tuple[TrainConfig, Path]:
        config = self.config.train_config(arm, seed, plan.steps)
        return config, self.folder / RUNS_FOLDER / config.name

    def _run_seconds(self, plan: RecommendPlan) -> float:
        """Time of a run: what the plan expects, times how much slower the last two runs were than their plan."""
        expected = plan.steps * (plan.step_seconds or 0.0) + (plan.run_seconds or 0.0)
        return expected * max(self._slowdowns[-2:], default=1.0)

    def _has_room(self, plan: RecommendPlan, arms: Sequence[Arm], seed: int, more: int = 0) -> bool:
        """Whether the budget has room for a run of each arm on `seed` and for `more` runs after them.

        What was begun is finished, so a command that resumes decides as it did before.
        """

        def decide() -> bool:
            if plan.budget_seconds is None or any(self._run_place(plan, arm, seed)[1].exists() for arm in arms):
                return True
            audit = implementation_seconds(self.config, plan.step_seconds or 0.0)
            needed = (len(arms) + more) * self._run_seconds(plan) + audit
            return self.seconds + needed <= plan.budget_seconds

        return self.job.from_first(decide)

    def _say_left_out(self, plan: RecommendPlan, what: str, needed: str, runs: int) -> None:
        """Which part of the plan is dropped: `what`, whose `needed` runs would take too long."""
        left = rounded_duration(max(0.0, (plan.budget_seconds or 0.0) - self.seconds))
        takes = rounded_duration(runs * self._run_seconds(plan))
        self.say(f"{what}: left out, {needed} would take about {takes}, and the budget has {left} left")

    def compare_recorded_runs(
        self, runs: Sequence[FinishedRun], seeds: Sequence[int], unfinished: Sequence[str]
    ) -> tuple[Checkpoint, Trials]:
        """The model and its trials, where the runs come from another training loop."""
        config, (seed, *further), first = self.config, seeds, runs[0]
        selection = self._compare([run for run in runs if run.seed == seed], "selection")
        with self.progress.step(f"loading {Path(config.model).name[-30:]}", None):
            checkpoint = self.job.together(load_checkpoint, config.model, allow_pickle=None, tokenizer=config.tokenizer)
        keys = dict.fromkeys(run.key for run in runs if run.key != CE_ARM.key)
        lr = first.config.get("lr", (first.config.get("settings") or {}).get("lr"))
        trials = Trials(
            report=self.audit(checkpoint),
            tested=Tested(
                model=Path(config.model).name,
                text=_text_of(first),
                lr=float(lr) if isinstance(lr, (int, float)) else None,
                steps=first.record.training.steps,
                tokens=first.record.tokens_consumed,
            ),
            arms=tuple(Arm(*key, (), "run by another trainer") for key in keys),
            selection=selection,
            selection_seed=seed,
            notes=(f"unfinished and left out: {', '.join(unfinished)}",) if unfinished else (),
        )
        carried = trials.carried
        wanted = {CE_ARM.key} if carried is None else {CE_ARM.key, carried.key, (STANDARD, carried.key[1])}
        confirming = tuple(run for run in runs if run.seed in further and run.key in wanted)
        confirmation = self._compare(confirming, "confirmation") if confirming else None
        return checkpoint, replace(trials, confirming=confirming, confirmation=confirmation)

    def _compare(self, runs: Sequence[FinishedRun], half: Half) -> Comparison:
        tolerance_ppl, thresholds = self.config.tolerance_ppl, self.thresholds
        return self.job.from_first(compare_on_half, runs, half, tolerance_ppl=tolerance_ppl, thresholds=thresholds)

    # Answer

    def finish(self, checkpoint: Checkpoint, trials: Trials) -> Recommendation:
        """Keep the comparisons, as `zloss report` reads them; implementation and router stage; the record."""
        for half, comparison in (("selection", trials.selection), ("confirmation", trials.confirmation)):
            if comparison is not None:
                comparison.write(self.folder / half)
        implementation = self._audit_implementation(checkpoint, trials)
        self.save_time()
        earlier = None
        with contextlib.suppress(InputError):
            earlier = read_record(self.folder / Recommendation.FILE, Recommendation)
        config, router, routers = self.config, trials.report.router, list[RouterScaleTable]()
        if router is not None and config.router_convention is not None:
            # The stated router loss of a model with routers.
            convention = find_convention(config.router_convention).name
            context = {"layers": router.layers, "top_k": router.top_k, "tokens": config.tokens_per_step}
            routers = [router_scale_table(config.router_coef, convention, **context, model_layers=router.model_layers)]
        return make_recommendation(
            trials,
            config,
            implementation=implementation,
            routers=routers,
            thresholds=self.thresholds,
            seconds=self.seconds,
            provenance=Provenance(**shared_keys(self.command, self.started, self.seconds)),
            earlier=earlier,
        )

    def _audit_implementation(self, checkpoint: Checkpoint, trials: Trials) -> ImplementationAudit:
        """Source, update and fp16 margin under the recommended arm, else under the carried one; made once."""
        self.say("implementation audit")
        answer, carried = trials.answer(), trials.carried
        key = (answer.method, answer.coef) if answer.method and answer.coef else carried.key if carried else CE_ARM.key
        config = self.config.implementation_config(Arm(*key))
        file = self.folder / "implementation" / ImplementationAudit.FILE
        of = f"{trials.tested.model} {trials.tested.text} {trials.report.provenance.extra.get(IDENTITY)}"
        identity = f"{of} {config.methods} {config.coef:g} {config.precision}"
        kept = _kept_record(file, ImplementationAudit, identity)
        if kept is not None:
            return kept
        made = run_implementation_audit(config, progress=self.progress, command=self.command, checkpoint=checkpoint)
        return _keep_record(file, made, identity)


def _kept_record(file: Path, record_type: type[Kept], identity: str) -> Kept | None:
    """The record in `file` where it is complete and of the same identity; a damaged file is rewritten."""
    try:
        found = read_record(file, record_type)
    except InputError:
        return None
    same = found.provenance.extra.get(IDENTITY) == _short(identity)
    return found if same and found.status == "complete" else None


def _keep_record(file: Path, made: Kept | None, identity: str) -> Kept:
    """Write a record under its identity, and read it back; one that was interrupted ends the command."""
    assert made is not None
    if made.status == "partial":
        raise KeyboardInterrupt
    extra = {**made.provenance.extra, IDENTITY: _short(identity)}
    # A page does not reveal local paths.
    named = replace(made.model, name=Path(made.model.name).name)
    replace(made, model=named, provenance=replace(made.provenance, extra=extra)).write(file)
    return read_record(file, type(made))


def _short(identity: str) -> str:
    return hashlib.sha256(f"{identity} {__version__}".encode()).hexdigest()[:16]


def _text_of(run: FinishedRun) -> str:
    data = run.config.get("data")
    train = data.get("train") if isinstance(data, dict) else None
    name = train.get("name") if isinstance(train, dict) else None
    return str(name) if name else "an unnamed text"
