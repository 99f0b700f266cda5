"""Columns of a training table from the metrics of its runs: means over matched seeds, and differences paired by seed.

Fractions of steps are pooled over the seeds, which for runs of equal length is their mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from zloss.train.compare.finished_run import FinishedRun

METRICS = {
    "d_inf_p99": "adam_d_inf_p99",
    "output_path_norm": "tied_paths.output_norm",
    "input_path_norm": "tied_paths.input_norm",
    "input_output_cosine": "tied_paths.cosine",
}
"""Columns whose key in metrics.json is another; a dot goes into a record."""
VALIDATION = ("ppl", "ce", "diag_z", "p_z_999", "a_p_99")
"""Numbers of the validation pass: those of a model that diverged would be of its finite predictions only."""
STEP_QUANTILES = ("grad_norm_p99",)
LEAST_STEPS = 100
"""Steps below which a p99 over steps is not given."""


class Unavailable(Exception):
    """A number that the runs do not give; the message says why."""


def column_value(column: str, runs: Sequence[FinishedRun], baseline: Sequence[FinishedRun]) -> float:
    """The number of one line, `baseline` being the CE runs of the same seeds in the same order."""
    if column.startswith("delta_"):
        name = column.removeprefix("delta_")
        return statistics.fmean(_metric(run, name) - _metric(base, name) for base, run in _pairs(baseline, runs))
    if column == "v_max_ratio_to_ce":
        ratios = [_metric(run, "adam_v_max") / _metric(base, "adam_v_max") for base, run in _pairs(baseline, runs)]
        return statistics.fmean(ratios)
    if column.endswith("_std"):
        if len(runs) < 2:
            raise Unavailable("a standard deviation takes at least two seeds")
        return statistics.stdev(_metric(run, column.removesuffix("_std")) for run in runs)
    steps = int(runs[0].metrics["steps"])
    if column in STEP_QUANTILES and steps < LEAST_STEPS:
        raise Unavailable(f"over {steps} steps a p99 is little else than the maximum, which the JSON file has")
    return statistics.fmean(_metric(run, column) for run in runs)


def column_values(
    columns: Sequence[str], runs: Sequence[FinishedRun], baseline: Sequence[FinishedRun]
) -> tuple[dict[str, float | None], dict[str, str]]:
    """(the numbers of one line by column, why a number is missing by column)."""
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for column in columns:
        try:
            values[column] = column_value(column, runs, baseline)
        except Unavailable as unavailable:
            reasons[column] = str(unavailable)
    return values, reasons


def _pairs(baseline: Sequence[FinishedRun], runs: Sequence[FinishedRun]) -> list[tuple[FinishedRun, FinishedRun]]:
    pairs = list(zip(baseline, runs, strict=True))
    assert all(base.seed == run.seed for base, run in pairs)
    return pairs


def _metric(run: FinishedRun, column: str) -> float:
    name = METRICS.get(column, column)
    lost = sum(run.metrics.get("valid_nonfinite", {}).values())
    if lost and name in VALIDATION:
        total = run.metrics["valid_predictions"]
        raise Unavailable(f"seed {run.seed} diverged: {lost} of {total} validation predictions are not finite")
    outer, _, inner = name.partition(".")
    value = run.metrics.get(outer)
    if inner and value is not None:
        value = value.get(inner)
    if value is None:
        reasons = run.metrics.get("reasons", {})
        why = reasons.get(outer) or reasons.get(outer.partition("_")[0]) or "not measured"
        raise Unavailable(f"seed {run.seed}: {why}")
    return float(value)
