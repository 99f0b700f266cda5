"""The run of a training table: every arm at the same seeds with everything else equal.

Columns are means over matched seeds, and differences paired by seed. Fractions of steps are pooled over the seeds, which for
runs of equal length is their mean. The numbers of the single runs are in `details.runs` of the result file, so that claims
about every run can be evaluated again without the runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zloss.report.comparison import step_figure
from zloss.report.figures import write_figures
from zloss.report.numbers import number
from zloss.train.compare import step_means
from zloss.train.finished import FinishedRun, check_pair
from zloss_paper.engine.claims import Missing
from zloss_paper.engine.inputs import CENTERED_HEAD
from zloss_paper.engine.recipe import Recipe, RecipeResult
from zloss_paper.engine.table import Key, Line, PaperTable, Table, cells_of, paper_table
from zloss_paper.engine.workbench import Workbench
from zloss_paper.training.settings import BASELINE, Arm, TrainingTable, TrainingTableConfig

COEFFICIENT = "lambda_aux"
"""The column that is a setting, not a measured number."""
METRICS = {
    "d_inf_p99": "adam_d_inf_p99",
    "output_path_norm": "tied_paths.output_norm",
    "input_path_norm": "tied_paths.input_norm",
    "input_output_cosine": "tied_paths.cosine",
}
"""Columns with a different key in metrics.json; a dot leads into a record."""
VALIDATION = ("ppl", "ce", "diag_z", "p_z_999", "a_p_99")
"""Numbers of the validation pass: those of a model that diverged would be of its finite predictions only."""
STEP_QUANTILES = ("grad_norm_p99",)
LEAST_STEPS = 100
"""Steps below which a p99 over steps is not given."""
EACH_RUN = ("ppl", "nonfinite_gradient", "nonfinite_microbatch", "adam_d_ratio_p99")
"""What claims read of each run."""
STATED = {"nonfinite_gradient": "nonfinite_gradient_events", "nonfinite_microbatch": "nonfinite_microbatch_events"}
"""Quantities that the paper states of all runs of a table, by their name in its settings."""
DRAWN = ("grad_norm", "p_z_999")
"""What is drawn over the steps."""
SAME_STEPS = (
    "Centered head has the losses and gradient norms of CE at every step, bit for bit: with the fused head it trains on the "
    "same gradients, and only the coordinate it is read in differs. In the paper's bf16 path rounding makes the two differ."
)
OTHER_STEPS = "Centered head left the trajectory of CE, which the fused head should not allow."
"""With the fused head, Centered head and CE must take the same steps."""
Runs = dict[Arm, tuple[FinishedRun, ...]]


def training_recipe(table: TrainingTable, paper: PaperTable | None = None) -> Recipe[TrainingTableConfig]:
    """The recipe of a table; `paper` replaces the paper's table of the same label."""
    if table.printed:
        paper = _with_stated_events(paper or paper_table(table.label))
    title, run = table.title or (paper.title if paper is not None else ""), partial(run_table, table)
    return Recipe(table.label, title, table.columns, table.configure, run, paper, table.claims, with_each_run)


def run_table(table: TrainingTable, config: TrainingTableConfig, bench: Workbench) -> RecipeResult:
    """Train the runs that are not kept yet, and make the lines of the table."""
    runs = matched_runs(config, bench)
    printed = [run for arm in config.arms for run in runs[arm]]
    seconds = sum(run.provenance.seconds for run in printed if run.provenance is not None)
    details = {
        "runs": [_run_record(run) for run in printed],
        "training_seconds": {"runs": len(printed), "seconds": seconds},
    }

    def draw(folder: Path) -> Sequence[Path]:
        lines = {arm.method: runs[arm] for arm in config.arms}
        return [draw_steps(folder / f"{table.label.partition(':')[2]}.svg", lines)]

    return RecipeResult(
        with_each_run(table_of(table, config, runs), details),
        notes=run_notes(config, runs, bench),
        texts=config.texts,
        details=details,
        draw=draw if table.figure else None,
    )


def matched_runs(config: TrainingTableConfig, bench: Workbench) -> Runs:
    """All runs of a table by arm, seed by seed in the same order; pairs are checked to be matched."""
    arms = dict.fromkeys((BASELINE, *config.arms))
    runs = {arm: tuple(bench.run(arm.of(config.train, seed), config.base) for seed in config.seeds) for arm in arms}
    for arm in arms:
        for baseline, run in zip(runs[BASELINE], runs[arm], strict=True):
            check_pair(baseline, run)
    return runs


def table_of(table: TrainingTable, config: TrainingTableConfig, runs: Runs) -> Table:
    """One line per arm."""
    measured = [column for column in table.columns if column != COEFFICIENT]
    lines = []
    for arm in config.arms:
        values, reasons = column_values(measured, runs[arm], runs[BASELINE])
        if COEFFICIENT in table.columns:
            values = {COEFFICIENT: arm.coef, **values}
        key: dict[str, Key] = dict(arm.key) or {"method": arm.method}
        lines.append(Line(key, cells_of(values), reasons, config.deviations))
    return Table(tuple(lines))


def column_values(
    columns: Sequence[str], runs: Sequence[FinishedRun], baseline: Sequence[FinishedRun]
) -> tuple[dict[str, float | None], dict[str, str]]:
    """(the numbers of one line by column, why a number is missing by column)."""
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for column in columns:
        try:
            values[column] = column_value(column, runs, baseline)
        except Missing as missing:
            reasons[column] = str(missing)
    return values, reasons


def column_value(column: str, runs: Sequence[FinishedRun], baseline: Sequence[FinishedRun]) -> float:
    """The number of one line, `baseline` being the CE runs of the same seeds in the same order."""
    pairs = list(zip(baseline, runs, strict=True))
    assert all(base.seed == run.seed for base, run in pairs)
    if column.startswith("delta_"):
        name = column.removeprefix("delta_")
        return statistics.fmean(_metric(run, name) - _metric(base, name) for base, run in pairs)
    if column == "v_max_ratio_to_ce":
        return statistics.fmean(_metric(run, "adam_v_max") / _metric(base, "adam_v_max") for base, run in pairs)
    if column.endswith("_std"):
        if len(runs) < 2:
            raise Missing("a standard deviation takes at least two seeds")
        return statistics.stdev(_metric(run, column.removesuffix("_std")) for run in runs)
    steps = int(runs[0].metrics["steps"])
    if column in STEP_QUANTILES and steps < LEAST_STEPS:
        raise Missing(f"over {steps} steps a p99 is little more than the maximum, which the JSON file has")
    return statistics.fmean(_metric(run, column) for run in runs)


def _metric(run: FinishedRun, column: str) -> float:
    name = METRICS.get(column, column)
    lost = sum(run.metrics.get("valid_nonfinite", {}).values())
    if lost and name in VALIDATION:
        total = run.metrics["valid_predictions"]
        raise Missing(f"seed {run.seed} diverged: {lost} of {total} validation predictions are not finite")
    outer, _, inner = name.partition(".")
    value = run.metrics.get(outer)
    if inner and value is not None:
        value = value.get(inner)
    if value is None:
        reasons = run.metrics.get("reasons", {})
        why = reasons.get(outer) or reasons.get(outer.partition("_")[0]) or "not measured"
        raise Missing(f"seed {run.seed}: {why}")
    return float(value)


def with_each_run(table: Table, details: Mapping[str, Any]) -> Table:
    """The lines with the numbers of their runs, which `details` has line by line, seed by seed."""
    records = details.get("runs", ())
    if not table.lines or not records or len(records) % len(table):
        return table
    seeds = len(records) // len(table)
    lines = []
    for place, line in enumerate(table):
        own = records[place * seeds : (place + 1) * seeds]
        # Where a mean does not exist because a run diverged, the runs' own numbers are not used either.
        numbers = {
            name: tuple(float(record[name]) for record in own)
            for name in EACH_RUN
            if name not in line.reasons and all(record.get(name) is not None for record in own)
        }
        lines.append(replace(line, by_seed=numbers))
    return Table(tuple(lines))


def _with_stated_events(paper: PaperTable) -> PaperTable:
    """The paper's lines with what it states of every run of the table: how many events were not finite."""
    stated = {name: paper.config[key] for name, key in STATED.items() if paper.config.get(key) is not None}
    runs = int(paper.config.get("seeds_count") or 1)
    by_seed = {name: (float(value),) * runs for name, value in stated.items()}
    return replace(paper, table=Table(tuple(replace(line, by_seed=by_seed) for line in paper.table)))


def _run_record(run: FinishedRun) -> dict[str, Any]:
    """The numbers of one run for the JSON file, with those of both heads and of both paths of a tied table."""
    plain = {name: value for name, value in run.metrics.items() if not isinstance(value, (dict, list))}
    records = {name: run.metrics.get(name) for name in ("heads", "tied_paths", "reasons")}
    return {"run": run.folder.name, **plain, **records}


def run_notes(config: TrainingTableConfig, runs: Runs, bench: Workbench) -> tuple[str, ...]:
    """Tokens of a run, the model all runs start from, and whether the control left the trajectory of CE."""
    first = runs[BASELINE][0].metrics
    notes = [
        f"Each run takes {number(first['tokens_consumed'])} of {number(first['tokens_available'])} training tokens "
        f"(reuse {number(first['reuse'])}) and is validated on {number(first['valid_predictions'])} predictions."
    ]
    if config.base is not None:
        start = bench.pretrained(config.base)
        notes.append(
            f"All runs start from one model, pretrained for {config.base.steps} steps on "
            f"{number(start.metrics['tokens_consumed'])} tokens to PPL {number(start.metrics['ppl'])} on the same "
            "validation blocks."
        )
        notes.append(
            "At this profile the runs of a table depend on its stress setting alone: tables that differ in the paper's model, "
            "corpus or length read the same runs, and only the paper's numbers beside them differ."
        )
    controls = [arm for arm in config.arms if arm.method == CENTERED_HEAD]
    if controls and config.train.head == "fused":
        taken = [
            [(step.loss, step.grad_norm) for run in runs[arm] for step in run.steps] for arm in (BASELINE, controls[0])
        ]
        notes.append(SAME_STEPS if taken[0] == taken[1] else OTHER_STEPS)
    return tuple(notes)


def draw_steps(file: Path, lines: Mapping[str, Sequence[FinishedRun]]) -> Path:
    """Gradient norm before clipping and log-normalizer tail over the steps, a curve per method; the same runs give the
    same bytes."""
    figures = []
    for key in DRAWN:
        means = {name: step_means([run.steps for run in runs], key) for name, runs in lines.items()}
        figures.append(step_figure(key, {name: (range(1, len(values) + 1), values) for name, values in means.items()}))
    return write_figures(file.parent, {file.stem: figures}, formats=("svg",))[0]
