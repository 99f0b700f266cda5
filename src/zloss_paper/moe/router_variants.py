"""tab:moe and text:moe_top2: a mixture of experts trained under several router losses, everything else equal.

    zloss reproduce tab:moe --profile paper
    zloss reproduce tab:moe text:moe_top2 --profile cpu --text train.txt

Every variant trains from the same weights on the same batches. The reductions are computed as they are written (replicas
gathered, routes counted), so a matched variant that trains like the token-layer mean is a result, not a definition. The
paper's tables have one line per variant. Ours have one per variant and seed and one for the mean over seeds, and a claim
has to hold on each of these.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zloss.report.comparison import step_figure
from zloss.report.figures import write_figures
from zloss.report.numbers import number
from zloss.results.options import CorpusName
from zloss.results.run_config import MoeRun, TrainConfig
from zloss.train.compare import compare_runs, router_curves
from zloss.train.finished import FinishedRun
from zloss.train.grid import Grid
from zloss_paper.engine.claims import Check, Claim, Missing, Tested, cell
from zloss_paper.engine.inputs import WIKITEXT, TextSource, text_sources
from zloss_paper.engine.recipe import Overrides, Profile, Recipe, RecipeResult
from zloss_paper.engine.table import Cell, Key, Line, Table, cells_of, paper_table
from zloss_paper.engine.workbench import Workbench

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
MEANS = ("ce", "ppl", "entropy", "load_cv")
"""Columns that are means over seeds; those of SPREADS have a standard deviation too."""
SPREADS = MEANS[:3]
COLUMNS = (
    *("s_rel", "ce", "ce_std", "ppl", "ppl_std", "entropy", "entropy_std", "load_cv", "router_absolute"),
    "max_loss_difference",
)
DETAILS = (
    *("entropy", "load_cv", "load_balance", "router_correction_norm", "router_log_z_p99", "router_log_z_p999"),
    *("router_log_z_max", "dropped_routes", "grad_norm_p99", "clip_rate", "router"),
)
"""What the JSON file adds about each run."""
MODELS: dict[Profile, dict[str, Any]] = {
    "paper": {"tokenizer": "gpt2"},
    "cpu": {},
    "smoke": {"layers": 2, "width": 32, "heads": 4, "expert_width": 16},
}
SCALES: dict[Profile, dict[str, Any]] = {
    "paper": {"valid_blocks": 64, "block_size": 256, "micro_batch": 8},
    "cpu": {"train_tokenizer": 8192, "valid_blocks": 64, "block_size": 128, "micro_batch": 4},
    "smoke": {"train_tokenizer": 300, "valid_blocks": 4, "block_size": 24, "micro_batch": 2},
}
"""The model and the run at each profile, where they differ from the defaults."""
MEAN = "mean"
"""The `seed` of a line over all seeds."""


@dataclass(frozen=True)
class MoeTableConfig:
    """The complete setting of a table of router variants, as its result file holds it."""

    profile: Profile
    grid: Grid
    texts: tuple[TextSource, ...]
    deviations: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MoeTable:
    """A table of router variants at one k as data."""

    label: str
    title: str
    top_k: int
    steps: Mapping[Profile, int]
    figure: str
    """Name of the figure's file."""
    variants: tuple[str, ...] = tuple(NAMES)
    variant_column: str = "router_loss"
    """The paper's name of what a line is about."""
    key: Mapping[str, Key] = field(default_factory=dict)
    """What else is in the key of every line."""
    remark: str = ""
    """Added to the readings of claims that the paper makes of another k."""

    def recipe(self) -> Recipe[MoeTableConfig]:
        """The recipe, with the same five claims for every k."""
        paper, claims = paper_table(self.label, "top_k"), moe_claims(self.top_k, self.remark)
        return Recipe(self.label, self.title, COLUMNS, self.configure, self.run, paper, claims)

    def configure(self, profile: Profile, overrides: Overrides) -> MoeTableConfig:
        """The grid at a profile: the paper's steps and seeds, or a scale that fits two cores."""
        paper, steps = profile == "paper", self.steps[profile]
        corpus: CorpusName | None = None if overrides.texts else "wikitext-103" if paper else "pydoc"
        base = TrainConfig(
            model="moe",
            moe=MoeRun(top_k=self.top_k, **MODELS[profile]),
            texts=overrides.texts,
            corpus=corpus,
            blocks=overrides.blocks,
            steps=steps,
            warmup=steps // 10,
            lr=1e-3,
            gradient_blocks=0,
            **SCALES[profile],
        )
        if overrides.block_size:
            base = replace(base, block_size=overrides.block_size)
        seeds = (1, 2, 3) if paper else (1, 2)
        grid = Grid(base, ("ce",), (0.0,), seeds, routers=self.variants, router_coefs=(ROUTER_COEF,))
        sources = text_sources(overrides.texts, corpus, overrides.text_source)
        notes = ("`--model` was ignored: this table trains its own model from scratch",) if overrides.models else ()
        deviations = []
        if {source.corpus for source in sources} != {WIKITEXT}:
            deviations.append(f"the text is {' + '.join(source.title for source in sources)}, not {WIKITEXT}")
        if steps != self.steps["paper"]:
            stated = f"{self.steps['paper']} steps (of an unstated number)"
            deviations.append(f"{steps} steps of {base.tokens_per_step} tokens, not {stated}")
        if not paper:
            deviations.append(f"{len(seeds)} seeds, not 3")
        if profile == "smoke":
            deviations.append("a model of width 32 with 2 blocks, not of width 256 with 4")
        deviations.append("tokenizer, batch, learning rate and expert width are ours: the paper does not state them")
        return MoeTableConfig(profile, grid, sources, tuple(deviations), notes)

    def run(self, config: MoeTableConfig, bench: Workbench) -> RecipeResult:
        """Train the runs that are not kept yet, compare them, and make one line per variant and one per variant and seed."""
        made = [(one.name, bench.run(one)) for one in config.grid.configs()]
        made.sort(key=lambda named: (list(NAMES).index(named[1].method), named[1].seed))
        runs = [run for _, run in made]
        comparison = compare_runs(runs).to_dict()
        curves = router_curves(runs)
        figures = [
            step_figure(key, {name: (range(1, len(values[key]) + 1), values[key]) for name, values in curves.items()})
            for key in ("entropy", "load_cv")
        ]
        seconds = sum(run.provenance.seconds for run in runs if run.provenance is not None)

        def draw(place: Path) -> list[Path]:
            return write_figures(place, {self.figure: figures}, formats=("svg",))

        tokens = comparison["tokens"]
        notes = (
            *config.notes,
            "lines with a seed are single runs; `mean` lines have the mean and the sample standard deviation over seeds",
            "max |ΔL|: largest difference of the training loss from that of the token-layer mean with the same seed, over all "
            "steps",
            "no route was dropped: OLMoE has no capacity",
            "the balancing term is OLMoE's: all layers pooled, about k at balance, so the coefficient 1e-2 adds about "
            f"{0.01 * self.top_k:g} to the loss",
            f"{tokens['consumed']:,} tokens per run of {tokens['available']:,} available, reuse factor {tokens['reuse']:.3g}",
            f"{len(runs)} runs in {seconds:.0f} s",
        )
        details = {
            "comparison": {name: comparison[name] for name in ("router", "quality", "tokens")},
            "runs": [
                {"run": name, "seed": run.seed, **{metric: run.metrics.get(metric) for metric in DETAILS}}
                for name, run in made
            ],
        }
        return RecipeResult(self._table(config, runs, comparison["router"]), notes, config.texts, details, draw)

    def _table(self, config: MoeTableConfig, runs: Sequence[FinishedRun], router: Mapping[str, Any]) -> Table:
        gaps = {one["convention"]: one["max_loss_difference"] for one in (*router["conventions"], *router["off"])}
        means, single = [], []
        for variant in dict.fromkeys(run.method for run in runs):
            group = [run for run in runs if run.method == variant]
            beside = {**self.key, self.variant_column: NAMES[variant]}
            cells = {name: [float(run.metrics[name]) for run in group] for name in MEANS}
            shared = {name: group[0].metrics[name] for name in ("s_rel", "router_absolute")}
            values = {
                **shared,
                **{name: statistics.fmean(cells[name]) for name in MEANS},
                **{f"{name}_std": statistics.stdev(cells[name]) if len(group) > 1 else None for name in SPREADS},
                # None if one run has none: its losses are not finite.
                "max_loss_difference": None if None in gaps[variant] else max(gaps[variant], default=None),
            }
            means.append(Line({**beside, "seed": MEAN}, _cells(values), {}, config.deviations, beside))
            for i, run in enumerate(group):
                own = {**{name: cells[name][i] for name in MEANS}, **shared, "max_loss_difference": gaps[variant][i]}
                single.append(Line({**beside, "seed": str(run.seed)}, _cells(own), {}, config.deviations))
        return Table((*means, *single))


def _cells(values: Mapping[str, float | None]) -> dict[str, Cell]:
    return cells_of({name: values[name] for name in COLUMNS if name in values})


TLM, ARM, ARS = "token-layer mean", "active-route mean", "active-route sum"
MATCHED = (f"{ARM} matched", f"{ARS} matched")
RECOVERY = 1e-6
"""Largest difference of a matched run's loss, and largest relative difference of its metrics, from those of the token-layer
mean that still counts as numerical precision (ours)."""
SIMILAR_CE = 0.02
"""Largest spread of the validation CE over variants, in nat, that counts as similar (ours)."""
SeedTest = Callable[[dict[str, Line], str], Sequence[Tested]]
"""A test of the lines of one seed by variant."""


def moe_claims(top_k: int, remark: str) -> tuple[Claim, ...]:
    """What the paper says of its top-4 runs; `remark` is added to the readings of claims that it makes of another k."""
    everywhere = f"in every seed and on average{remark}"
    return (
        Claim(
            "relative_scales",
            f"Relative to the token-layer mean the active-route mean has scale 1/{top_k}, the active-route sum {top_k}, and "
            "the matched variants 1.",
            _over_seeds(_has_scales(top_k)),
        ),
        Claim(
            "matched_recovery",
            "Matched active-route variants recover the token-layer-mean run to numerical precision.",
            _over_seeds(_recovers),
            f"metrics within {RECOVERY:g} relative beyond rounding, and every step's loss within {RECOVERY:g} where it is "
            "there",
        ),
        Claim(
            "mean_lowers_entropy",
            "Unmatched active-route mean, a smaller scale, has lower router entropy than the token-layer mean.",
            _over_seeds(_ordered(ARM, TLM)),
            everywhere,
        ),
        Claim(
            "sum_raises_entropy",
            "Unmatched active-route sum, a larger scale, has higher router entropy than the token-layer mean.",
            _over_seeds(_ordered(TLM, ARS)),
            everywhere,
        ),
        Claim(
            "similar_ce",
            "Validation CE is similar across the router variants.",
            _over_seeds(_similar),
            f"within {SIMILAR_CE:g} nat of each other, {everywhere}",
        ),
    )


def _over_seeds(test: SeedTest) -> Check:
    """Holds when it holds of the lines of every seed by variant; a table without seeds counts as the mean."""

    def tests(table: Table) -> list[Tested]:
        seeds: dict[Key, dict[str, Line]] = {}
        for line in table:
            # Lines of top-2 call the variant a convention.
            variant = str(line.key.get("router_loss", line.key.get("convention", "")))
            seeds.setdefault(line.key.get("seed", MEAN), {})[variant] = line
        names = {seed: "mean over seeds" if seed == MEAN else f"seed {seed}" for seed in seeds}
        found = [tested for seed, lines in seeds.items() for tested in test(lines, names[seed])]
        if not found:
            raise Missing("the variants it is about were not measured")
        return found

    return tests


def _has_scales(top_k: int) -> SeedTest:
    scales = {"none": 0.0, TLM: 1.0, ARM: 1 / top_k, ARS: float(top_k), **dict.fromkeys(MATCHED, 1.0)}

    def test(lines: dict[str, Line], seed: str) -> list[Tested]:
        if seed != "mean over seeds":
            return []
        found = {name: cell(line, "s_rel") for name, line in lines.items()}
        return [
            (abs(one.value - scales[name]) <= one.half_unit + 1e-12, f"{name}: {one.value:g}")
            for name, one in found.items()
        ]

    return test


def _recovers(lines: dict[str, Line], seed: str) -> list[Tested]:
    tested = []
    for name in MATCHED:
        if name not in lines or TLM not in lines:
            continue
        base, line = lines[TLM], lines[name]
        apart = [_apart(base, line, column) for column in MEANS if column in base.cells]
        ok = bool(apart) and max(apart) <= RECOVERY
        sentence = f"{name}, {seed}: metrics within {max(apart, default=0):.2g}"
        if "max_loss_difference" in line.cells:
            gap = cell(line, "max_loss_difference").value
            ok, sentence = ok and gap <= RECOVERY, f"{sentence}, max |ΔL| {gap:.2g}"
        tested.append((ok, sentence))
    return tested


def _apart(base: Line, line: Line, column: str) -> float:
    """Relative distance beyond what rounding of the printed cells explains."""
    a, b = cell(base, column), cell(line, column)
    return max(0.0, abs(a.value - b.value) - a.half_unit - b.half_unit) / abs(a.value)


def _ordered(lower: str, higher: str) -> SeedTest:
    def test(lines: dict[str, Line], seed: str) -> list[Tested]:
        if lower not in lines or higher not in lines:
            return []
        a, b = cell(lines[lower], "entropy"), cell(lines[higher], "entropy")
        return [(a.value < b.value, f"{seed}: {lower} {a.value:.4f}, {higher} {b.value:.4f}")]

    return test


def _similar(lines: dict[str, Line], seed: str) -> list[Tested]:
    values = [cell(line, "ce").value for line in lines.values()]
    low, high = min(values), max(values)
    return [(high - low <= SIMILAR_CE, f"{seed}: {number(low)} … {number(high)}")]


TABLES = (
    # Expected: CE 5.835 … 5.836 for all six; entropy 1.714 without a router loss, 1.713, 1.725 and 1.756 at s_rel 0.25, 1 and
    # 4; the matched variants equal the token-layer mean. Cost of the cpu profile: 12 runs of 200 steps, about 25 minutes on
    # one core.
    MoeTable(
        label="tab:moe",
        title="Top-4 mixture of experts trained under six router losses",
        top_k=4,
        steps={"paper": 1200, "cpu": 200, "smoke": 10},
        figure="moe_top4",
    ),
    # The companion with two routes per token, of which the paper prints the relative scales only. Expected: s_rel 0.5, 1 and
    # 2, and the same recovery by matching. Entropy, CE and load are ours alone.
    MoeTable(
        label="text:moe_top2",
        title="Top-2 mixture of experts trained under three router losses, and matched",
        top_k=2,
        steps={"paper": 800, "cpu": 133, "smoke": 10},
        figure="moe_top2",
        variants=tuple(variant for variant in NAMES if variant != "none"),
        variant_column="convention",
        key={"top_k": 2},
        remark="; the paper says it of top-4 only",
    ),
)
RECIPES = tuple(table.recipe() for table in TABLES)
