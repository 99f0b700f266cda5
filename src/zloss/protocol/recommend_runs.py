"""The runs of a recommendation: do they fit into memory, what do they cost, which are planned, and how finished ones are read."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zloss.console import Progress, Silent, Step
from zloss.decide.intervals import LARGEST_EXPONENT, BlockValues, contiguous_groups, mean_over_tokens
from zloss.decide.recommend import (
    CE_ARM,
    LEAST_STEPS,
    RunKey,
    Speed,
    candidates,
    named_arms,
    plan_time,
    planned_runs,
    rounded_duration,
    with_references,
)
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict import CENTERED_HEAD
from zloss.errors import CheckpointError, InputError
from zloss.jobs import Job
from zloss.models.checkpoint import Checkpoint
from zloss.protocol.config import RecommendConfig
from zloss.protocol.recommend_answer import method_code
from zloss.results.audit import AuditReport, HeadNumbers, Heads
from zloss.results.comparison import Comparison, method_label
from zloss.results.options import Coordinate
from zloss.results.recommendation import Arm, ArmResult, LeftOut, RecommendPlan
from zloss.results.run_config import UNPENALIZED, TrainConfig
from zloss.results.run_metrics import (
    DELTA_U,
    DELTA_U_GAIN_AWARE,
    SHIFT,
    SHIFT_SQUARED,
    VIOLATION,
    VIOLATION_SQUARED,
    RunMetrics,
    ValidationBlocks,
)
from zloss.train.compare import compare_runs
from zloss.train.finished import FinishedRun, load_runs, read_run
from zloss.train.folder import check_finished, is_finished, read_steps
from zloss.train.live import NoView
from zloss.train.options import RunOptions
from zloss.train.run import run_training
from zloss.train.start import Start

COPIES = 4
"""The copy that is trained, its gradient, and both moments of Adam, all fp32."""
WEIGHTS = (".safetensors", ".gguf", ".bin")
PROBE_STEPS, PROBE_BLOCKS = 4, 4
PROBE_FOLDER = ".probe"
LEAST_INTERVAL = 60.0
"""Seconds of training between two checkpoints, at least; ten times what writing one takes where that is more."""
NO_ROOM = "the budget has no room for it"
IMPLEMENTATION_STEPS = 20
"""The implementation audit costs about as much as these passes over one block, forward and backward."""
STOPPED_FILE = "stopped.json"

Half = Literal["selection", "confirmation"]


# Memory


def check_files_fit(model: str) -> None:
    """Reject a local model whose weights alone, loaded and trained, exceed free memory; unknown sizes pass."""
    path = Path(model)
    files = list(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    size = sum(file.stat().st_size for file in files if file.suffix in WEIGHTS)
    # Files of 16 bits hold half the bytes of the fp32 weights, so this check may accept too much but never rejects too much.
    _check_memory(model, (1 + COPIES) * size)


def check_training_fits(checkpoint: Checkpoint) -> None:
    """Reject a loaded model whose training needs more than the free memory."""
    trained = [parameter for parameter in checkpoint.model.parameters() if parameter.is_floating_point()]
    _check_memory(checkpoint.name, COPIES * sum(4 * parameter.numel() for parameter in trained))


def _check_memory(name: str, needed: int) -> None:
    free = free_bytes()
    if free and needed > free:
        raise CheckpointError(
            f"training {Path(name).name} needs at least {needed / 1e9:.1f} GB (weights, gradient, two moments of Adam), but "
            f"only {free / 1e9:.1f} GB are free: run it on a larger machine, or train there and pass the folders of those `runs`."
        )


def free_bytes(root: Path = Path("/")) -> int:
    """What the kernel calls available, or what the limit of the control group leaves if that is less; 0 if not known."""
    free = 0
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s*(\d+) kB", (root / "proc/meminfo").read_text())
        free = 1024 * int(found[1]) if found else 0
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((root / "sys/fs/cgroup" / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(0, limit - used))
    return free


# Cost


@dataclass(frozen=True)
class RunCost:
    """Seconds of the parts of a run."""

    step: float
    """One optimizer step."""
    checkpoint: float
    """Writing one checkpoint."""
    valid_block: float
    """Validating one block."""
    rest: float
    """The copy of the model and the gradients of the trained one."""

    def checkpoint_every(self, steps: int) -> int:
        """Steps between two checkpoints."""
        interval = max(LEAST_INTERVAL, 10 * self.checkpoint)
        return min(steps, max(1, math.ceil(interval / max(self.step, 1e-9))))

    def besides_steps(self, steps: int, valid_blocks: int) -> float:
        """Everything in a run except its steps."""
        written = math.ceil(steps / self.checkpoint_every(steps))
        return self.rest + written * self.checkpoint + valid_blocks * self.valid_block


def probe_cost(job: Job, config: TrainConfig, start: Start, folder: Path, progress: Progress) -> RunCost:
    """The cost of a run with these settings, from four steps and four validation blocks in a folder that is removed again.

    All processes of the job train; the clock is that of the first.
    """
    place = folder / PROBE_FOLDER
    job.from_first(shutil.rmtree, place, ignore_errors=True)
    few = start.data.valid.first(PROBE_BLOCKS)
    timer = _Timer()
    began = time.perf_counter()
    try:
        with progress.step("timing a few steps", None):
            run_training(
                replace(config, steps=PROBE_STEPS, warmup=0),
                replace(start, data=replace(start.data, valid=few)),
                place,
                options=RunOptions(checkpoint_every=PROBE_STEPS),
                view=timer,
                progress=timer,
                job=job,
            )
        whole = time.perf_counter() - began
        seconds = job.from_first(lambda: [record.seconds or 0.0 for record in read_steps(place)])
    finally:
        if job.first:
            shutil.rmtree(place, ignore_errors=True)
    cost = RunCost(
        step=statistics.median(seconds[1:]),
        checkpoint=max(0.0, timer.training - sum(seconds)),
        valid_block=timer.validation / few.count,
        rest=max(0.0, whole - timer.training - timer.validation),
    )
    return job.from_first(lambda: cost)


class _Timer(Silent, NoView):
    """Seconds of the training loop, checkpoints included, and of the validation."""

    training = validation = 0.0

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.training = time.perf_counter() - began

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[Step]:
        began = time.perf_counter()
        with super().step(name, total, unit) as shown:
            yield shown
        if name == "validation":
            self.validation += time.perf_counter() - began


# Plan


def plan_runs(
    config: RecommendConfig,
    report: AuditReport,
    cost: RunCost | None,
    steps: int | None,
    *,
    spent: float,
    spent_before: float,
    kept: Collection[RunKey],
    identity: str,
    text: str,
) -> RecommendPlan:
    """The arms that the audit proposes, and what the budget has room for after `spent` seconds; without `cost` all of them.

    `spent_before`: the part of `spent` that earlier commands on the folder took. `kept`: the runs in it.
    """
    requested = named_arms(config.methods)
    proposed = [arm for arm in candidates(report) if arm.key not in {one.key for one in requested}]
    found = (*requested, *proposed)[: config.max_arms]
    arms, seeds, per_run, seconds = with_references(found), config.seeds, steps or LEAST_STEPS, None
    if cost is not None:
        speed = speed_of(config, cost, steps, spent, spent=spent_before)
        arms, seeds, per_run = plan_time(found, seeds, speed, budget=config.budget_seconds, steps=steps, kept=kept)
        seconds = speed.seconds(planned_runs(arms, seeds, kept), per_run)
    return RecommendPlan(
        identity=identity,
        model=Path(config.model).name,
        text=text,
        arms=tuple(replace(arm, code=method_code(*arm.key)) for arm in (CE_ARM, *arms)),
        left_out=tuple(LeftOut(arm.method, arm.coef, NO_ROOM) for arm in found if arm not in arms),
        seeds=seeds,
        steps=per_run,
        settings=config.settings(per_run),
        request=config.request,
        checkpoint_every=per_run if cost is None else cost.checkpoint_every(per_run),
        budget_seconds=config.budget_seconds,
        seconds=seconds,
        step_seconds=None if cost is None else cost.step,
        run_seconds=None if cost is None else cost.besides_steps(per_run, config.valid_blocks),
    )


def speed_of(config: RecommendConfig, cost: RunCost, steps: int | None, before_runs: float, spent: float) -> Speed:
    """What the runs cost; `before_runs` are the seconds that pass before the first one, the `spent` ones of earlier commands
    included.
    """
    besides = cost.besides_steps(steps or LEAST_STEPS, config.valid_blocks)
    return Speed(cost.step, besides, before_runs + implementation_seconds(config, cost.step), spent)


def implementation_seconds(config: RecommendConfig, step: float) -> float:
    """The implementation audit, where an optimizer step takes `step` seconds."""
    return IMPLEMENTATION_STEPS * step * config.block_size / config.tokens_per_step


def audit_seconds(config: RecommendConfig, cost: RunCost) -> float:
    """A pass over the text, and four gradients on eight blocks."""
    return config.audit_blocks * cost.valid_block + 2 * 8 * cost.step * config.block_size / config.tokens_per_step


def plan_sentence(plan: RecommendPlan) -> str:
    """What will be run, and how long it is expected to take."""
    names = "; ".join(arm.label for arm in plan.arms)
    time = "" if plan.seconds is None else f"; about {rounded_duration(plan.seconds)} in all"
    of = "" if plan.budget_seconds is None else f" of {rounded_duration(plan.budget_seconds)}"
    out = (
        f"; left out: {'; '.join(method_label(one.method, one.coef) for one in plan.left_out)}" if plan.left_out else ""
    )
    seeds = ", ".join(map(str, plan.seeds[1:]))
    return f"{names}, {plan.steps} steps each, on seed {plan.seeds[0]}; the best one and CE on {seeds}{time}{of}{out}"


# Runs in the folder of a recommendation


def kept_run(place: Path, arm: Arm, config: TrainConfig, start: Start) -> FinishedRun | ArmResult | None:
    """The run that `place` holds, finished or stopped early; None if it is still to be made. Other settings are rejected."""
    found = read_run(place) if is_finished(place) else stopped_arm(place, arm)
    if found is not None:
        check_finished(place, config, start)
    return found


def stopped_arm(place: Path, arm: Arm) -> ArmResult | None:
    """The result of an arm whose run in `place` ended early, because its rejection was certain; None for any other run."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found: Any = json.loads((place / STOPPED_FILE).read_text(encoding="utf-8"))
        reason = f"its rejection was certain: {found['reason']}"
        return ArmResult(arm.method, arm.coef, "stopped", arm.stages, reason, arm.note, steps=int(found["step"]))
    return None


def read_recorded_runs(
    folders: Sequence[str], preferred: Sequence[int]
) -> tuple[list[FinishedRun], list[int], list[str]]:
    """(all finished runs of the folders, CE first, by seed; seeds of CE, the selecting one first; names of unfinished runs).

    They come from another training loop, or from `zloss train`. CE and one Z method are needed, at the same seeds.
    """
    found, unfinished = list[FinishedRun](), list[str]()
    for folder in folders:
        runs, missing = load_runs(Path(folder))
        found += runs
        unfinished += missing
    for run in found:
        target = run.config.get("target")
        if target is not None and run.method not in UNPENALIZED:
            raise InputError(
                f"{run.folder.name} trains with a target of {target:g}, but a recommendation is for c = log V, the default: "
                "use `zloss compare` on these runs."
            )
    ce = sorted((run for run in found if run.key == CE_ARM.key), key=lambda run: run.seed)
    others = [run for run in found if run.method not in (CE_ARM.method, CENTERED_HEAD)]
    if not ce or not others:
        lacking = "no finished run of ce" if not ce else "no finished run of a method with a Z-loss"
        raise InputError(f"`runs` has {lacking}: a recommendation compares both at the same seeds.")
    seeds = [run.seed for run in ce]
    first = next((seed for seed in preferred if seed in seeds), seeds[0])
    return ce + others, [first, *(seed for seed in seeds if seed != first)], unfinished


# Finished runs, read on half of their validation text


def compare_on_half(
    runs: Sequence[FinishedRun], half: Half, *, tolerance_ppl: float | None, thresholds: Thresholds
) -> Comparison:
    """Matched runs on one half of the validation text, with Centered head read from those of CE."""
    heads = [head for run in runs if run.key == CE_ARM.key and (head := as_centered_head(run)) is not None]
    return compare_runs(
        [on_half(run, half) for run in (*runs, *heads)], tolerance_ppl=tolerance_ppl, thresholds=thresholds
    )


def as_centered_head(run: FinishedRun) -> FinishedRun | None:
    """The CE run as a run of Centered head; None if μ does not exist, or where another head was trained.

    With a fused head the two train bit for bit alike. They differ in the coordinate that is deployed, and both coordinates are
    in the metrics of the CE run.
    """
    head = run.record.heads.centered
    if head.p_z_999 is None or run.config.get("head", "fused") != "fused":
        return None
    return replace(
        run,
        config={**run.config, "method": CENTERED_HEAD},
        record=replace(
            run.record,
            method=CENTERED_HEAD,
            coordinate="centered",
            diag_z=head.diag_z,
            p_z_999=head.p_z_999,
            a_p_99=head.a_p_99,
            mu_abs_99=head.mu_abs_99,
        ),
    )


def on_half(run: FinishedRun, half: Half) -> FinishedRun:
    """The run with the validation numbers of one half of its text: one half selects an arm, the other confirms it.

    The blocks are cut into the groups of a verdict (at most 32 contiguous ones). Groups 0, 2, 4, … select; 1, 3, 5, … confirm.
    Every number is of that half alone; a number that is not kept block by block is None.
    """
    record, whole = run.record, run.record.validation_blocks
    if whole is None:
        raise InputError(f"{run.folder.name} has no per-block validation: repeat the run with this version of zloss.")
    parity = 0 if half == "selection" else 1
    chosen = [b for b, group in enumerate(contiguous_groups(len(whole.tokens))) if group % 2 == parity]
    blocks = ValidationBlocks(
        tokens=tuple(whole.tokens[b] for b in chosen),
        ce=tuple(whole.ce[b] for b in chosen),
        kept=whole.kept,
        tails={key: tuple(values[b] for b in chosen) for key, values in whole.tails.items()},
        means={key: tuple(values[b] for b in chosen) for key, values in whole.means.items()},
    )
    ce = mean_over_tokens(blocks.ce, blocks.tokens)
    heads = Heads(_head(record, blocks, "raw"), _head(record, blocks, "centered"))
    deployed = heads.centered if record.coordinate == "centered" else heads.raw
    of_half = replace(
        record,
        ce=ce,
        ppl=None if ce is None or ce > LARGEST_EXPONENT else math.exp(ce),
        diag_z=deployed.diag_z,
        p_z_999=deployed.p_z_999,
        a_p_99=None,
        mu_abs_99=deployed.mu_abs_99,
        valid_predictions=sum(blocks.tokens),
        heads=heads,
        validation_blocks=blocks,
    )
    return replace(run, record=of_half)


def _head(record: RunMetrics, blocks: ValidationBlocks, coordinate: Coordinate) -> HeadNumbers:
    def tail(name: str, level: float) -> float | None:
        found = BlockValues(blocks.tails.get(f"{name}.{coordinate}", ()), blocks.tokens).quantile(level)
        return found if math.isfinite(found) else None

    square, shift = (
        mean_over_tokens(blocks.means.get(f"{name}.{coordinate}", ()), blocks.tokens)
        for name in (VIOLATION_SQUARED, SHIFT_SQUARED)
    )
    return HeadNumbers(
        diag_z=None if square is None else record.diag_coef * square,
        p_z_999=tail(VIOLATION, 0.999),
        mu_abs_99=tail(SHIFT, 0.99),
        mu_rms=None if shift is None else math.sqrt(shift),
        delta_u_99=tail(DELTA_U, 0.99),
        delta_u_99_gain_aware=tail(DELTA_U_GAIN_AWARE, 0.99),
    )
