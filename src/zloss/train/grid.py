"""Matched groups of runs: every method at every coefficient and seed, everything else equal, one folder per run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from zloss.console import Progress
from zloss.errors import InputError, UnknownNameError, ZlossError
from zloss.jobs import Job
from zloss.results.run_config import OFF, UNPENALIZED, TrainConfig
from zloss.train.data import check_divisible
from zloss.train.folder import check_finished, config_record, is_finished, refuse_other_settings
from zloss.train.live import LiveView, TerminalView
from zloss.train.loss import method_names, run_loss
from zloss.train.options import RunOptions
from zloss.train.run import run_training
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
                raise InputError(f"`{name}` is expected to be a list without duplicates, but got {list(values)!r}.")
        for method in self.methods:
            if method not in method_names():
                raise UnknownNameError("method", method, method_names())

    def configs(self) -> Iterator[TrainConfig]:
        """The runs seed by seed, so that finished seeds can be compared before the last one; CE once for all coefficients."""
        for seed, method in itertools.product(self.seeds, self.methods):
            unpenalized = method in UNPENALIZED
            until = None if unpenalized else self.base.coef_until
            for coef in (0.0,) if unpenalized else self.coefs:
                config = replace(self.base, method=method, coef=coef, coef_until=until, seed=seed)
                if config.moe is None:
                    yield config
                    continue
                for router in self.routers:
                    for router_coef in (0.0,) if router == OFF else self.router_coefs:
                        yield replace(config, moe=replace(config.moe, router=router, router_coef=router_coef))


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
    remaining = job.from_first(_unfinished, configs, start, folder)
    for config in configs:
        if config.name not in remaining:
            say(f"{config.name}: finished before, skipped")
            continue
        if isinstance(view, TerminalView):
            number = remaining.index(config.name) + 1
            view.place(number, len(remaining), (len(remaining) - number) * config.steps)
        began = time.monotonic()
        place = folder / config.name
        metrics = run_training(config, start, place, options=options, view=view, progress=progress, job=job)
        if metrics is not None:
            found = {"PPL": metrics.ppl, "P_Z^99.9": metrics.p_z_999, "max ‖g‖": metrics.training.grad_norm_max}
            numbers = [f"{name} {value:.4g}" for name, value in found.items() if value is not None]
            say(f"{config.name}: done, {', '.join(numbers)}, {timedelta(seconds=round(time.monotonic() - began))}")
    return [folder / config.name for config in configs]


def _unfinished(configs: Sequence[TrainConfig], start: Start, folder: Path) -> list[str]:
    """Names of the runs to make; the settings of finished ones are checked again, and their config.json is rewritten."""
    names = []
    for config in configs:
        if is_finished(folder / config.name):
            check_finished(folder / config.name, config, start)
        else:
            names.append(config.name)
    return names


def _check_runs(configs: Sequence[TrainConfig], start: Start, folder: Path, job: Job) -> None:
    """Check all runs before the first one trains, so that none of them ends the grid midway.

    Rejected are a run that cannot be divided over the processes of `job`, a folder that contains a run with other settings, and
    a method that cannot be computed for this model.
    """
    for config in configs:
        check_divisible(config, job)
    for config in configs:
        refuse_other_settings(folder / config.name, config_record(config, start).to_dict())
    for config in {replace(config, seed=0): config for config in configs}.values():
        _try_loss(config, start)


@torch.no_grad()
def _try_loss(config: TrainConfig, start: Start) -> None:
    """Compute the loss of the run on a few tokens of its text: a method that this model does not support is rejected."""
    blocks = start.data.train
    tokens = min(CHECK_TOKENS, blocks.size)
    inputs = blocks.inputs(0, 1)[:, : tokens + (blocks.bos_id is not None)]
    try:
        run_loss(config, start.checkpoint, blocks)(inputs, blocks.targets(0, 1)[:, :tokens], tokens)
    except ZlossError as error:
        raise InputError(f"{config.method} cannot be trained on {start.checkpoint.name}: {error}") from error
