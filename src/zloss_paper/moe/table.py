"""What the two mixture-of-experts recipes share: the runs of a table, their rows, their figure.

Every variant trains from the same weights on the same batches; the reductions are the written ones (replicas gathered,
routes counted), so that a matched variant that trains like the token-layer mean says something.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zloss.report.charts.matplotlib_files import write_panels
from zloss.report.charts.training import router_panels
from zloss.train.compare.comparison import compare_runs
from zloss.train.compare.finished_run import FinishedRun, load_runs
from zloss.train.compare.router_curves import router_curves
from zloss.train.config import TrainConfig
from zloss.train.grid import Grid, run_grid
from zloss.train.moe.config import MoeRun
from zloss.train.run import RunOptions
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured
from zloss_paper.engine.table import Cell, Key, Row, Table, measured
from zloss_paper.engine.texts import WIKITEXT, TextSource, text_sources
from zloss_paper.engine.workbench import Workbench

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
ROUTER_COEF = 1e-3
NAMES = {
    "none": "none",
    "token_layer_mean": "token-layer mean",
    "active_route_mean": "active-route mean",
    "active_route_mean:matched": "active-route mean matched",
    "active_route_sum": "active-route sum",
    "active_route_sum:matched": "active-route sum matched",
}
"""Our variants and the paper's names of them."""
MEAN = "mean"
"""The `seed` of a row over all seeds."""
CHOICES = {
    "corpus_variant": "the raw variant, wikitext-103-raw-v1: training on its train split, validation on its own",
    "tokenizer": "GPT-2's (cpu: a byte-level BPE of 8192 entries trained on the training text)",
    "expert_hidden_width": "512, gated (SwiGLU), as OLMoE's experts are",
    "target_c_r": "log 8",
    "block_size": "256 (cpu: 128)",
    "micro_batch": "8 blocks (cpu: 4)",
    "grad_accumulation": "none",
    "optimizer": "AdamW, β 0.9 and 0.95, as in the dense runs",
    "lr": "1e-3 with a cosine to 0",
    "warmup_steps": "a tenth of the steps",
    "weight_decay": "0.1 on matrices and tables",
    "clip_threshold": "1",
    "precision": "fp32",
    "capacity_policy": "no capacity: no route is dropped",
    "train_tokens_consumed_per_run": "steps times tokens per step: 2.5 M at top-4 (cpu: 102,400)",
    "eval_predictions": "64 blocks",
    "seed_values": "1, 2, 3 (cpu: 1, 2)",
    "std_ddof": "1",
    "companion_run": "measured, see text:moe_top2",
}


@dataclass(frozen=True)
class MoeTableConfig:
    """The complete setting of a table of router variants."""

    profile: Profile
    grid: Grid
    texts: tuple[TextSource, ...]
    deviations: tuple[str, ...]
    notes: tuple[str, ...] = ()


def moe_table(
    top_k: int, steps: Mapping[Profile, int], routers: Sequence[str], profile: Profile, overrides: Overrides
) -> MoeTableConfig:
    """The grid of a table at a profile: the paper's steps and seeds, or a scale that fits two cores."""
    paper, smoke = profile == "paper", profile == "smoke"
    moe = MoeRun(top_k=top_k, tokenizer="gpt2" if paper else None)
    if smoke:
        moe = MoeRun(top_k=top_k, layers=2, width=32, heads=4, expert_width=16)
    corpus = None if overrides.texts else "wikitext-103" if paper else "pydoc"
    count = steps[profile]
    base = TrainConfig(
        model="moe",
        moe=moe,
        train_tokenizer=None if paper else 300 if smoke else 8192,
        texts=overrides.texts,
        corpus=corpus,
        blocks=overrides.blocks,
        valid_blocks=4 if smoke else 64,
        block_size=overrides.block_size or (256 if paper else 24 if smoke else 128),
        steps=count,
        warmup=count // 10,
        lr=1e-3,
        micro_batch=8 if paper else 2 if smoke else 4,
        gradient_blocks=0,
    )
    seeds = (1, 2, 3) if paper else (1, 2)
    grid = Grid(base, ("ce",), (0.0,), seeds, routers=tuple(routers), router_coefs=(ROUTER_COEF,))
    sources = text_sources(overrides.texts, corpus, overrides.text_source)
    ignored = ("--model was left aside: this table trains a model of its own from scratch",) if overrides.models else ()
    return MoeTableConfig(profile, grid, sources, _deviations(base, seeds, steps["paper"], sources, smoke), ignored)


def _deviations(
    base: TrainConfig, seeds: Sequence[int], steps: int, sources: Sequence[TextSource], smoke: bool
) -> tuple[str, ...]:
    found = []
    if {source.corpus for source in sources} != {WIKITEXT}:
        found.append(f"the text is {' + '.join(source.title for source in sources)}, not {WIKITEXT}")
    if base.steps != steps:
        found.append(f"{base.steps} steps of {base.tokens_per_step} tokens, not {steps} steps (of an unstated number)")
    if len(seeds) != 3:
        found.append(f"{len(seeds)} seeds, not 3")
    if smoke:
        found.append("a model of width 32 with 2 blocks, not of width 256 with 4")
    return (*found, "tokenizer, batch, learning rate and expert width are ours: the paper does not state them")


def run_moe_table(config: MoeTableConfig, bench: Workbench, stem: str, key: Mapping[str, Key]) -> Measured:
    """Train what is not finished, compare, and make one row per variant and one per variant and seed.

    Each row's key holds `key`, the variant's name under `router_loss` and the seed.
    """
    with _folder(config, bench) as folder:
        run_grid(
            config.grid,
            folder,
            options=RunOptions(checkpoint_every=50, command=bench.command),
            progress=bench.progress,
        )
        runs, _ = load_runs(folder)
        runs = _in_order(runs)
        comparison = compare_runs(runs)
        rows = _rows(config, runs, comparison, key)
        seconds = [json.loads((run.folder / "provenance.json").read_text())["seconds"] for run in runs]
        panels = router_panels(router_curves(runs))

    def draw(place: Path) -> list[Path]:
        return write_panels([place / f"{stem}.svg"], panels)

    tokens, moe = comparison["tokens"], config.grid.base.moe
    assert moe is not None
    notes = (
        *config.notes,
        "rows with a seed are single runs; `mean` rows have the mean and the sample standard deviation over seeds",
        "max |ΔL|: largest difference of the training loss from that of the token-layer mean with the same seed, over all steps",
        "no route was dropped: OLMoE has no capacity",
        "the balancing term is OLMoE's: all layers pooled, about k at balance, so the coefficient 1e-2 adds about "
        f"{0.01 * moe.top_k:g} to the loss",
        f"{tokens['consumed']:,} tokens per run of {tokens['available']:,} available, reuse factor {tokens['reuse']:.3g}",
        f"{len(runs)} runs in {sum(seconds):.0f} s",
    )
    details = {
        "comparison": {name: comparison[name] for name in ("router", "quality", "tokens")},
        "runs": _details(runs),
    }
    return Measured(Table(tuple(rows)), notes, config.texts, details, draw)


@contextlib.contextmanager
def _folder(config: MoeTableConfig, bench: Workbench) -> Iterator[Path]:
    """Runs are kept by the fingerprint of their setting, so that a second call goes on where the first one stopped."""
    if bench.folder is None:
        with tempfile.TemporaryDirectory() as place:
            yield Path(place)
        return
    plain = asdict(config.grid)
    plain["base"]["texts"] = [source.sha256 or source.name for source in config.texts]
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]
    yield bench.folder / "runs" / f"moe-{digest}"


def _in_order(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    return sorted(runs, key=lambda run: (list(NAMES).index(run.method), run.seed))


def _rows(
    config: MoeTableConfig, runs: Sequence[FinishedRun], comparison: Mapping[str, Any], key: Mapping[str, Key]
) -> list[Row]:
    router = comparison["router"]
    gaps = {record["convention"]: record["max_loss_difference"] for record in (*router["conventions"], *router["off"])}
    rows, single = [], []
    for variant in dict.fromkeys(run.method for run in runs):
        group = [run for run in runs if run.method == variant]
        beside = {**key, "router_loss": NAMES[variant]}
        cells = {name: [float(run.metrics[name]) for run in group] for name in ("ce", "ppl", "entropy", "load_cv")}
        shared = {"s_rel": group[0].metrics["s_rel"], "router_absolute": group[0].metrics["router_absolute"]}
        means = {name: statistics.fmean(values) for name, values in cells.items()}
        spread = {
            f"{name}_std": statistics.stdev(cells[name]) if len(group) > 1 else None
            for name in ("ce", "ppl", "entropy")
        }
        values = {**shared, **means, **spread, "max_loss_difference": _largest(gaps[variant])}
        rows.append(Row({**beside, "seed": MEAN}, _cells(values), {}, config.deviations, beside))
        for i, run in enumerate(group):
            own = {name: values[i] for name, values in cells.items()}
            own |= {**shared, "max_loss_difference": gaps[variant][i]}
            single.append(Row({**beside, "seed": str(run.seed)}, _cells(own), {}, config.deviations))
    return [*rows, *single]


def _largest(gaps: Sequence[float | None]) -> float | None:
    """None where one run has none: its losses are not finite."""
    known = [gap for gap in gaps if gap is not None]
    return max(known) if known and len(known) == len(gaps) else None


def _cells(values: Mapping[str, float | None]) -> dict[str, Cell]:
    return measured({name: values[name] for name in COLUMNS if name in values})


def _details(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """What the table does not show of every run."""
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
    return [
        {"run": run.folder.name, "seed": run.seed, **{name: run.metrics.get(name) for name in names}} for run in runs
    ]
