"""A table of matched training runs.

A table is a set of arms (method and coefficient), each run at the same seeds with everything else equal. Its columns are
means over the seeds. The config of a profile states the runs and in what they deviate from the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zloss.results.train_config import TrainConfig
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Key, Line, Table, cells_of
from zloss_paper.engine.texts import training_sources
from zloss_paper.engine.workbench import Workbench
from zloss_paper.training.arms import BASELINE, Arm
from zloss_paper.training.base_model import base_config
from zloss_paper.training.deviations import PaperSetting, deviations, start_model
from zloss_paper.training.each_run import with_each_run
from zloss_paper.training.figure import draw_steps
from zloss_paper.training.matched_runs import Runs, matched_runs, run_record, training_seconds
from zloss_paper.training.run_notes import run_notes
from zloss_paper.training.seed_means import column_values
from zloss_paper.training.setting import TrainingTableConfig
from zloss_paper.training.small_training import SCALES, SEEDS, SmallSetting, small_config

COEFFICIENT = "lambda_aux"
"""The column that is a setting, not a measured number."""


@dataclass(frozen=True)
class TrainingTable:
    """What defines a table: the paper's setting, and which small setting stands for it."""

    label: str
    model: str
    """The paper's name of its model."""
    corpus: str
    """The paper's name of its corpus."""
    columns: tuple[str, ...]
    arms: tuple[Arm, ...]
    paper: TrainConfig
    """The run that all methods share at the paper's scale."""
    seeds: tuple[int, ...]
    small: SmallSetting
    figure: bool = False
    """Whether the steps of its runs are drawn."""

    def configure(self, profile: Profile, overrides: Overrides) -> TrainingTableConfig:
        """The complete setting at a profile."""
        texts = tuple(overrides.texts)
        if profile == "paper":
            shared, base, seeds = self.paper, None, self.seeds
            if texts:
                shared = replace(shared, texts=texts, corpus=None)
        else:
            shared, seeds = small_config(profile, self.small, texts), SEEDS
            base = base_config(SCALES[profile], texts)
        given = start_model(overrides.models, self.model)
        if given is not None:
            shared, base = replace(shared, model=given.source), None
        if overrides.blocks is not None:
            shared = replace(shared, blocks=overrides.blocks or None)
        if overrides.block_size is not None:
            shared = replace(shared, block_size=overrides.block_size)
        sources = training_sources(texts, shared.corpus, overrides.text_source)
        config = TrainingTableConfig(self.label, profile, shared, base, self.arms, seeds, sources, ())
        stated = PaperSetting(self.model, self.corpus, self.paper, len(self.seeds))
        return replace(config, deviations=deviations(config, stated, None if given is None else given.name))

    def run(self, config: TrainingTableConfig, bench: Workbench) -> RecipeResult:
        """Train the runs that are not kept yet, and make the lines of the table."""
        runs = matched_runs(config, bench)

        def draw(folder: Path) -> Sequence[Path]:
            lines = {arm.method: runs[arm] for arm in config.arms}
            return [draw_steps(folder / f"{self.label.partition(':')[2]}.svg", lines)]

        details = {
            "runs": [run_record(run) for arm in config.arms for run in runs[arm]],
            "training_seconds": training_seconds([run for arm in config.arms for run in runs[arm]]),
        }
        return RecipeResult(
            with_each_run(table_of(self, config, runs), details),
            notes=run_notes(config, runs, bench),
            texts=config.texts,
            details=details,
            draw=draw if self.figure else None,
        )


def table_of(table: TrainingTable, config: TrainingTableConfig, runs: Runs) -> Table:
    """One line per arm."""
    return Table(tuple(_line(arm, table.columns, runs, config.deviations) for arm in config.arms))


def _line(arm: Arm, columns: Sequence[str], runs: Runs, deviations: tuple[str, ...]) -> Line:
    measured = [column for column in columns if column != COEFFICIENT]
    values, reasons = column_values(measured, runs[arm], runs[BASELINE])
    if COEFFICIENT in columns:
        values = {COEFFICIENT: arm.coef, **values}
    key: dict[str, Key] = dict(arm.key) or {"method": arm.method}
    return Line(key, cells_of(values), reasons, deviations)
