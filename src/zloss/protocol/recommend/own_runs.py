"""Runs of a trainer of one's own, in the place of runs made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zloss.errors import InputError
from zloss.results.recommend_plan import Arm
from zloss.results.train_config import UNPENALIZED
from zloss.train.compare.finished_run import FinishedRun, load_runs


@dataclass(frozen=True)
class OwnRuns:
    """Matched runs by other hands."""

    ce: tuple[FinishedRun, ...]
    arms: tuple[Arm, ...]
    runs: tuple[FinishedRun, ...]
    """Runs of the arms."""
    seeds: tuple[int, ...]
    """Seeds of CE; the first one selects."""
    unfinished: tuple[str, ...]


def read_own_runs(folders: Sequence[str], preferred: Sequence[int]) -> OwnRuns:
    """All finished runs of the folders; CE and one Z method are needed, at the same seeds."""
    found, unfinished = list[FinishedRun](), list[str]()
    for folder in folders:
        runs, missing = load_runs(Path(folder))
        found += runs
        unfinished += missing
    ce = sorted((run for run in found if run.key == ("ce", 0.0)), key=lambda run: run.seed)
    others = tuple(run for run in found if run.method not in UNPENALIZED)
    if not ce or not others:
        lacking = "no finished run of ce" if not ce else "no finished run of a method with a Z-loss"
        raise InputError(f"`runs` hold {lacking}: a recommendation compares both at the same seeds.")
    seeds = [run.seed for run in ce]
    first = next((seed for seed in preferred if seed in seeds), seeds[0])
    arms = tuple(
        Arm(method, coef, (), "run by a trainer of one's own")
        for method, coef in dict.fromkeys(run.key for run in others)
    )
    return OwnRuns(tuple(ce), arms, others, (first, *(seed for seed in seeds if seed != first)), tuple(unfinished))
