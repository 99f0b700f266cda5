"""The runs of a mixture-of-experts table, its lines and its figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zloss.report.charts.matplotlib_files import write_panels
from zloss.report.charts.training import router_panels
from zloss.train.compare.comparison import compare_runs
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.compare.router_curves import router_curves
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Cell, Key, Line, Table, cells_of
from zloss_paper.engine.workbench import Workbench
from zloss_paper.moe.setting import NAMES, MoeTableConfig

COLUMNS = (
    "s_rel",
    "ce",
    "ce_std",
    "ppl",
    "ppl_std",
    "entropy",
    "entropy_std",
    "load_cv",
    "router_absolute",
    "max_loss_difference",
)
MEAN = "mean"
"""The `seed` of a line over all seeds."""


def run_moe_table(
    config: MoeTableConfig, bench: Workbench, stem: str, key: Mapping[str, Key], variant_column: str
) -> RecipeResult:
    """Train the runs that are not kept yet, compare them, and make one line per variant and one per variant and seed.

    The key of a line holds `key`, the variant's name under `variant_column` and the seed. The figure is named `stem`.
    """
    made = [(one.name, bench.runs.run(one)) for one in config.grid.configs()]
    made.sort(key=lambda named: (list(NAMES).index(named[1].method), named[1].seed))
    runs = [run for _, run in made]
    comparison = compare_runs(runs).to_dict()
    lines = _lines(config, runs, comparison, key, variant_column)
    seconds = [run.provenance.seconds for run in runs if run.provenance is not None]
    panels = router_panels(router_curves(runs))

    def draw(place: Path) -> list[Path]:
        return write_panels([place / f"{stem}.svg"], panels)

    tokens, moe = comparison["tokens"], config.grid.base.moe
    assert moe is not None
    notes = (
        *config.notes,
        "lines with a seed are single runs; `mean` lines have the mean and the sample standard deviation over seeds",
        "max |ΔL|: largest difference of the training loss from that of the token-layer mean with the same seed, over all steps",
        "no route was dropped: OLMoE has no capacity",
        "the balancing term is OLMoE's: all layers pooled, about k at balance, so the coefficient 1e-2 adds about "
        f"{0.01 * moe.top_k:g} to the loss",
        f"{tokens['consumed']:,} tokens per run of {tokens['available']:,} available, reuse factor {tokens['reuse']:.3g}",
        f"{len(runs)} runs in {sum(seconds):.0f} s",
    )
    details = {
        "comparison": {name: comparison[name] for name in ("router", "quality", "tokens")},
        "runs": [_details(name, run) for name, run in made],
    }
    return RecipeResult(Table(tuple(lines)), notes, config.texts, details, draw)


def _lines(
    config: MoeTableConfig,
    runs: Sequence[FinishedRun],
    comparison: Mapping[str, Any],
    key: Mapping[str, Key],
    variant_column: str,
) -> list[Line]:
    router = comparison["router"]
    gaps = {record["convention"]: record["max_loss_difference"] for record in (*router["conventions"], *router["off"])}
    means_over_seeds, single = [], []
    for variant in dict.fromkeys(run.method for run in runs):
        group = [run for run in runs if run.method == variant]
        beside = {**key, variant_column: NAMES[variant]}
        cells = {name: [float(run.metrics[name]) for run in group] for name in ("ce", "ppl", "entropy", "load_cv")}
        shared = {"s_rel": group[0].metrics["s_rel"], "router_absolute": group[0].metrics["router_absolute"]}
        means = {name: statistics.fmean(values) for name, values in cells.items()}
        spread = {
            f"{name}_std": statistics.stdev(cells[name]) if len(group) > 1 else None
            for name in ("ce", "ppl", "entropy")
        }
        values = {**shared, **means, **spread, "max_loss_difference": _largest(gaps[variant])}
        means_over_seeds.append(Line({**beside, "seed": MEAN}, _cells(values), {}, config.deviations, beside))
        for i, run in enumerate(group):
            own = {name: values[i] for name, values in cells.items()}
            own |= {**shared, "max_loss_difference": gaps[variant][i]}
            single.append(Line({**beside, "seed": str(run.seed)}, _cells(own), {}, config.deviations))
    return [*means_over_seeds, *single]


def _largest(gaps: Sequence[float | None]) -> float | None:
    """None where one run has none: its losses are not finite."""
    known = [gap for gap in gaps if gap is not None]
    return max(known) if known and len(known) == len(gaps) else None


def _cells(values: Mapping[str, float | None]) -> dict[str, Cell]:
    return cells_of({name: values[name] for name in COLUMNS if name in values})


def _details(name: str, run: FinishedRun) -> dict[str, Any]:
    """What the table does not show of a run."""
    names = (
        "entropy",
        "load_cv",
        "load_balance",
        "router_correction_norm",
        "router_log_z_p99",
        "router_log_z_p999",
        "router_log_z_max",
        "dropped_routes",
        "grad_norm_p99",
        "clip_rate",
        "router",
    )
    return {"run": name, "seed": run.seed, **{metric: run.metrics.get(metric) for metric in names}}
