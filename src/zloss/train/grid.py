"""Matched groups of runs: every method at every coefficient and seed, everything else equal, one folder per run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zloss.console import Progress
from zloss.errors import InputError, UnknownNameError, ZlossError
from zloss.jobs import Job
from zloss.objectives import objective_names
from zloss.results.run_config import OFF, UNPENALIZED, TrainConfig
from zloss.results.run_metrics import RunMetrics
from zloss.train.data import check_divisible
from zloss.train.folder import check_finished, is_finished, refuse_other_settings
from zloss.train.live import LiveView, Position, TerminalView, duration
from zloss.train.loss import run_loss
from zloss.train.options import RunOptions
from zloss.train.run import run_training_of
from zloss.train.start import Start, prepare_start

CHECK_TOKENS = 8
"""Tokens of the forward pass that every method is tried on."""


@dataclass(frozen=True)
class Grid:
    """The runs of one experiment."""

    base: TrainConfig
    """What the runs share."""
    methods: tuple[str, ...]
    """Methods by name."""
    coefs: tuple[float, ...]
    """Coefficients of the methods that have one."""
    seeds: tuple[int, ...]
    """Seeds of every method."""
    routers: tuple[str, ...] = (OFF,)
    """Router variants of a base with experts."""
    router_coefs: tuple[float, ...] = (0.0,)
    """Coefficients λ_R of the router variants that have one."""

    def __post_init__(self) -> None:
        for name in ("methods", "coefs", "seeds", "routers", "router_coefs"):
            values: Sequence[object] = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise InputError(f"`{name}` is expected to be a list without repetitions, but got {list(values)!r}.")
        for method in self.methods:
            if method not in objective_names():
                raise UnknownNameError("method", method, objective_names())

    def configs(self) -> Iterator[TrainConfig]:
        """The runs seed by seed, so that finished seeds can be compared before the last one; CE once for all coefficients."""
        for seed in self.seeds:
            for method in self.methods:
                for coef in (0.0,) if method in UNPENALIZED else self.coefs:
                    yield from self._routed(replace(self.base, method=method, coef=coef, seed=seed))

    def _routed(self, config: TrainConfig) -> Iterator[TrainConfig]:
        if config.moe is None:
            yield config
            return
        for router in self.routers:
            for coef in (0.0,) if router == OFF else self.router_coefs:
                yield replace(config, moe=replace(config.moe, router=router, router_coef=coef))


def run_grid(
    grid: Grid,
    folder: Path,
    *,
    options: RunOptions | None = None,
    view: LiveView | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    job: Job | None = None,
) -> list[Path]:
    """Make the runs that are not finished and return the folders of all runs. The processes of `job` share each run."""
    job = job or Job()
    start = job.together(prepare_start, next(grid.configs()))
    for note in start.notes:
        say(note)
    configs = [start.with_block_size(config) for config in grid.configs()]
    job.together(_check_runs, configs, start, folder, job)
    finished = job.from_first(_finished, configs, start, folder)
    remaining = len(configs) - len(finished)
    number = 0
    for config in configs:
        place = folder / config.name
        if config.name in finished:
            say(f"{config.name}: finished before, skipped")
            continue
        number += 1
        if isinstance(view, TerminalView):
            view.place(Position(number, remaining, (remaining - number) * config.steps))
        began = time.monotonic()
        metrics = run_training_of(job, config, start, place, options=options, view=view, progress=progress)
        if metrics is not None:
            say(f"{config.name}: done, {_result_text(metrics)}, {duration(time.monotonic() - began)}")
    return [folder / config.name for config in configs]


def _result_text(metrics: RunMetrics) -> str:
    """The main numbers of a finished run, in at most 50 columns."""
    numbers = {"PPL": metrics.ppl, "P_Z^99.9": metrics.p_z_999, "max ‖g‖": metrics.training.grad_norm_max}
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if value is not None)


def _finished(configs: Sequence[TrainConfig], start: Start, folder: Path) -> set[str]:
    """Names of the finished runs in the folder; their settings are checked again, and config.json is rewritten."""
    finished = [config for config in configs if is_finished(folder / config.name)]
    for config in finished:
        check_finished(folder / config.name, config, start)
    return {config.name for config in finished}


def _check_runs(configs: Sequence[TrainConfig], start: Start, folder: Path, job: Job) -> None:
    """Check all runs before the first one trains, so that none of them ends the grid midway.

    Refused are a run that cannot be divided over the processes of `job`, a folder that holds a run with other settings, and
    a method that cannot be computed for this model.
    """
    for config in configs:
        check_divisible(config, job)
    for config in configs:
        refuse_other_settings(folder / config.name, config, start)
    tried = {replace(config, seed=0): config for config in configs}
    for config in tried.values():
        _try_loss(config, start)


@torch.no_grad()
def _try_loss(config: TrainConfig, start: Start) -> None:
    """The loss of the run on a few tokens of its text."""
    blocks = start.data.train
    tokens = min(CHECK_TOKENS, blocks.size)
    inputs = blocks.inputs(0, 1)[:, : tokens + (blocks.bos_id is not None)]
    try:
        run_loss(config, start.checkpoint, start.data)(inputs, blocks.targets(0, 1)[:, :tokens], tokens)
    except ZlossError as error:
        raise InputError(f"{config.method} cannot be trained on {start.checkpoint.name}: {error}") from error
