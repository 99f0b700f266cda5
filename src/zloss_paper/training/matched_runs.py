"""The runs of a training table: every arm at the same seeds, with everything else equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zloss.train.compare.finished_run import FinishedRun, check_pair
from zloss_paper.engine.workbench import Workbench
from zloss_paper.training.arms import BASELINE, Arm
from zloss_paper.training.setting import TrainingTableConfig

Runs = dict[Arm, tuple[FinishedRun, ...]]


def matched_runs(config: TrainingTableConfig, bench: Workbench) -> Runs:
    """All runs of a table by arm, seed by seed in the same order; pairs are checked to be matched."""
    arms = dict.fromkeys((BASELINE, *config.arms))
    runs = {
        arm: tuple(bench.runs.run(arm.of(config.train, seed), config.base) for seed in config.seeds) for arm in arms
    }
    for arm in arms:
        for baseline, run in zip(runs[BASELINE], runs[arm], strict=True):
            check_pair(baseline, run)
    return runs


def run_record(run: FinishedRun) -> dict[str, Any]:
    """The numbers of one run for the JSON file, with those of both heads and of both paths of a tied table."""
    plain = {name: value for name, value in run.metrics.items() if not isinstance(value, (dict, list))}
    records = {name: run.metrics.get(name) for name in ("heads", "tied_paths", "reasons")}
    return {"run": run.folder.name, **plain, **records}


def training_seconds(runs: Sequence[FinishedRun]) -> dict[str, float]:
    """How long the runs took when they were made."""
    return {"runs": len(runs), "seconds": sum(run.provenance.seconds for run in runs if run.provenance is not None)}
