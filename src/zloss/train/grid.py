"""Matched groups of runs: every method at every coefficient and seed, everything else equal, one folder per run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zloss.console import Progress
from zloss.distributed import Job
from zloss.errors import InputError, UnknownNameError
from zloss.objectives import objective_names
from zloss.results.moe_config import OFF
from zloss.results.run_metrics import RunMetrics
from zloss.results.train_config import UNPENALIZED, TrainConfig
from zloss.train.check_runs import check_runs
from zloss.train.folder.run_folder import is_finished, settle_finished
from zloss.train.run import run_training_of
from zloss.train.run_options import RunOptions
from zloss.train.start.run_start import Start, prepare_start
from zloss.train.step.live import LiveView, Position, TerminalView, duration


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
    """Make the runs that are not finished. The result is the folders of all runs. The processes of `job` share each run."""
    job = job or Job()
    start = job.together(prepare_start, next(grid.configs()))
    for note in start.notes:
        say(note)
    configs = [start.settled(config) for config in grid.configs()]
    job.together(check_runs, configs, start, folder, job)
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
            say(f"{config.name}: done, {result_text(metrics)}, {duration(time.monotonic() - began)}")
    return [folder / config.name for config in configs]


def result_text(metrics: RunMetrics) -> str:
    """The main numbers of a finished run, in at most 50 columns."""
    numbers = {"PPL": metrics.ppl, "P_Z^99.9": metrics.p_z_999, "max ‖g‖": metrics.training.grad_norm_max}
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if value is not None)


def _finished(configs: Sequence[TrainConfig], start: Start, folder: Path) -> set[str]:
    """Names of the runs that the folder holds, finished; their settings are checked once more and written anew."""
    names = {config.name for config in configs if is_finished(folder / config.name)}
    for config in configs:
        if config.name in names:
            settle_finished(folder / config.name, config, start)
    return names
