"""Matched groups of runs: every method at every coefficient and seed, everything else equal, one folder per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zloss.console.progress import Progress
from zloss.errors import InputError, UnknownNameError
from zloss.ranks.job import Job
from zloss.results.moe_config import OFF
from zloss.results.train_config import UNPENALIZED, TrainConfig
from zloss.source.objectives.registry import objective_names
from zloss.train.folder.run_folder import claim_folder, is_finished
from zloss.train.run import run_training_of
from zloss.train.run_options import RunOptions
from zloss.train.start.run_start import Start, prepare_start
from zloss.train.step.live import LiveView


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
    configs = list(grid.configs())
    start: Start | None = None
    places = []
    for config in configs:
        place = folder / config.name
        places.append(place)
        if start is None:
            start = job.together(prepare_start, config)
            for note in start.notes:
                say(note)
        config = start.settled(config)
        if job.from_first(_claim_finished, place, config, start):
            say(f"{config.name}: finished before, skipped")
            continue
        run_training_of(job, config, start, place, options=options, view=view, progress=progress)
        say(f"{config.name}: done")
    return places


def _claim_finished(place: Path, config: TrainConfig, start: Start) -> bool:
    """Whether the folder holds this run, finished."""
    finished = is_finished(place)
    if finished:
        claim_folder(place, config, start)
    return finished
