"""The runs of a plan: every arm on the first seed, then CE and the chosen arm on the others, within the budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zloss.decide import stages
from zloss.decide.recommend.candidates import CENTERED_HEAD, GAIN_AWARE, STANDARD
from zloss.decide.recommend.judged_arm import JudgedArm, judge_arms, ranked
from zloss.decide.recommend.time_plan import rounded_duration
from zloss.protocol.recommend.arm_runs import ArmRunner, StoppedArm, Watch
from zloss.protocol.recommend.centered_reading import as_centered_head
from zloss.protocol.recommend.prepare import CE_ARM, NO_ROOM, Prepared
from zloss.protocol.recommend.session import Session
from zloss.protocol.recommend.validation_halves import Half, on_half
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.recommend_plan import Arm
from zloss.train.compare.comparison import compare_runs
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.run_options import RunOptions


@dataclass(frozen=True)
class Outcome:
    """What the runs gave."""

    arms: tuple[Arm, ...]
    """Arms with a run, without CE."""
    selection: Comparison | None
    """The first seed on the selecting half; None where no run was finished."""
    judged: tuple[JudgedArm, ...]
    """Every arm of the selection, Centered head included."""
    chosen: JudgedArm | None
    """The arm that went on; one that does not pass is the nearest."""
    confirmation: Comparison | None
    """CE, Centered head and the chosen arm on the other seeds and the confirming half."""
    runs: tuple[FinishedRun, ...]
    """The runs of the confirmation."""
    seeds: tuple[int, ...]
    """The selecting seed, then those that confirmed."""
    stopped: dict[tuple[str, float], StoppedArm] = field(default_factory=dict)
    left_out: tuple[tuple[Arm, str], ...] = ()
    notes: tuple[str, ...] = ()


def source_fired(report: AuditReport) -> bool:
    """Whether the common shift was diagnosed, so that Centered head is an answer."""
    return any(decision.fired for decision in report.decisions if decision.stage == stages.SOURCE.name)


def compared(session: Session, runs: Iterable[FinishedRun], half: Half) -> Comparison:
    """Matched runs on one half of the validation text, with Centered head read from those of CE."""
    found = list(runs)
    heads = [head for run in found if run.key == CE_ARM.key and (head := as_centered_head(run)) is not None]
    return compare_runs(
        [on_half(run, half) for run in (*found, *heads)],
        tolerance_ppl=session.config.tolerance_ppl,
        thresholds=session.thresholds,
    )


def choose(judged: Sequence[JudgedArm], *, centered_head: bool) -> JudgedArm | None:
    """The first arm that passes, else the nearest of those that were trained."""
    trained = tuple(arm for arm in judged if arm.key[0] != CENTERED_HEAD)
    passing = [arm for arm in ranked(tuple(judged) if centered_head else trained) if arm.passes]
    return next(iter(passing or ranked(trained)), None)


class Experiment:
    """The runs of one plan; finished ones are kept, so the same calls go on after an interruption."""

    def __init__(self, session: Session, prepared: Prepared) -> None:
        self._session, self._prepared, self._plan = session, prepared, prepared.plan
        options = RunOptions(checkpoint_every=self._plan.checkpoint_every, command=session.command)
        self._runner = ArmRunner(
            prepared.start, session.runs_folder, options, session.view, session.progress, session.crew
        )
        self._slowdowns = list[float]()
        self._notes = list[str]()

    def run(self) -> Outcome:
        """Selection, then confirmation."""
        plan, centered_head = self._plan, source_fired(self._prepared.report)
        seed, *further = plan.seeds
        arms = plan.arms[1:]
        needs = 3 if any(arm.method == GAIN_AWARE for arm in arms) else 2
        left = 1 + len(arms) + needs * len(further)
        baseline = self._train(CE_ARM, seed, left)
        assert isinstance(baseline, FinishedRun)
        runs, stopped, left_out = [baseline], dict[tuple[str, float], StoppedArm](), list[tuple[Arm, str]]()
        for number, arm in enumerate(arms):
            left = len(arms) - number + needs * len(further)
            if number and not self._fits(arm, seed, 1 + needs * len(further)):
                left_out.append((arm, NO_ROOM))
                self._say_left_out(
                    arm.label, f"its run and {needs * len(further)} of the confirmation", 1 + needs * len(further)
                )
                continue
            found = self._train(arm, seed, left, endpoints=baseline.metrics)
            if isinstance(found, StoppedArm):
                stopped[arm.key] = found
                self._session.say(f"{arm.label}: stopped at step {found.step}, {found.reason}")
                continue
            runs.append(found)
            self._say_so_far(compared(self._session, runs, "selection"), arm.key)
        selection = compared(self._session, runs, "selection")
        judged = judge_arms(selection)
        chosen = choose(judged, centered_head=centered_head)
        confirming = self._confirm(chosen, further, centered_head)
        confirmation = compared(self._session, confirming, "confirmation") if confirming else None
        seeds = (seed, *dict.fromkeys(run.seed for run in confirming))
        return Outcome(
            arms=tuple(arm for arm in arms if arm not in [one for one, _ in left_out]),
            selection=selection,
            judged=judged,
            chosen=chosen,
            confirmation=confirmation,
            runs=tuple(confirming),
            seeds=seeds,
            stopped=stopped,
            left_out=tuple(left_out),
            notes=tuple(self._notes),
        )

    def _confirm(self, chosen: JudgedArm | None, seeds: Sequence[int], centered_head: bool) -> list[FinishedRun]:
        arms = [CE_ARM, *_confirmed_arms(chosen)]
        if chosen is None and not centered_head:
            return []
        if chosen is not None:
            word = "chosen" if chosen.passes else "the nearest arm"
            self._session.say(f"{chosen.verdict.label}: {word} on seed {self._plan.seeds[0]}; now the confirming seeds")
        runs = list[FinishedRun]()
        for number, seed in enumerate(seeds):
            if number and not self._fits(arms[-1], seed, len(arms)):
                self._notes.append(f"the budget had no room for seed {seed}")
                self._say_left_out(f"seed {seed}", "its run" if len(arms) == 1 else f"its {len(arms)} runs", len(arms))
                continue
            for place, arm in enumerate(arms):
                found = self._train(arm, seed, len(arms) * (len(seeds) - number) - place)
                assert isinstance(found, FinishedRun)
                runs.append(found)
        return runs

    def _train(
        self, arm: Arm, seed: int, left: int, endpoints: dict[str, float | None] | None = None
    ) -> FinishedRun | StoppedArm:
        """One run; `left` counts this one and those behind it."""
        session = self._session
        config = session.config.train_config(arm, seed, self._plan.steps)
        kept = self._runner.is_kept(config)
        if not kept:
            runs = f"{left} run{'s' if left != 1 else ''} left"
            session.say(f"{arm.label}, seed {seed}: {runs}, about {rounded_duration(left * self._run_seconds())}")
        found = self._runner.run(config, Watch(session.stopwatch.tick, endpoints, session.thresholds))
        session.stopwatch.save()
        if kept:
            session.say(f"{arm.label}, seed {seed}: kept from before")
        if isinstance(found, FinishedRun) and found.provenance is not None and self._plan.step_seconds:
            # Of all steps, those before an interruption included.
            self._slowdowns.append(found.provenance.train_seconds / (self._plan.steps * self._plan.step_seconds))
        return found

    def _fits(self, arm: Arm, seed: int, runs: int) -> bool:
        """Whether the budget has room for so many runs from now; a run that is kept costs nothing."""
        budget = self._plan.budget_seconds
        kept = self._runner.is_kept(self._session.config.train_config(arm, seed, self._plan.steps))
        return kept or budget is None or self._session.stopwatch.seconds + runs * self._run_seconds() <= budget

    def _say_left_out(self, what: str, needed: str, runs: int) -> None:
        """What was planned and is dropped while it runs, with the time that it would need and the time that is left."""
        left = max(0.0, (self._plan.budget_seconds or 0.0) - self._session.stopwatch.seconds)
        time = rounded_duration(runs * self._run_seconds())
        self._session.say(
            f"{what}: left out, {needed} would take about {time}, and the budget has {rounded_duration(left)} left"
        )

    def _run_seconds(self) -> float:
        """Time of a run: what the plan expects, times how much slower the last two runs were than their plan."""
        expected = self._plan.steps * (self._plan.step_seconds or 0.0) + (self._plan.run_seconds or 0.0)
        return expected * max(self._slowdowns[-2:], default=1.0)

    def _say_so_far(self, selection: Comparison, key: tuple[str, float]) -> None:
        arm = next((arm for arm in judge_arms(selection) if arm.key == key), None)
        if arm is None:
            return
        numbers = (
            "" if arm.delta_ce is None or arm.ratio is None else f"ΔCE {arm.delta_ce:+.3g} nat, × {arm.ratio:.3g}; "
        )
        self._session.say(f"{arm.verdict.label}: {numbers}{arm.objection or 'passes so far'}")


def _confirmed_arms(chosen: JudgedArm | None) -> list[Arm]:
    """The chosen arm and its reference; Centered head needs no run beside CE."""
    if chosen is None or chosen.key[0] == CENTERED_HEAD:
        return []
    method, coef = chosen.key
    reference = [Arm(STANDARD, coef)] if method == GAIN_AWARE else []
    return [*reference, Arm(method, coef)]
