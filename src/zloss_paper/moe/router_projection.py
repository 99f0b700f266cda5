"""tab:router as a recipe: a seeded 16-expert linear router on a model's hidden states, top-k × convention.

    zloss reproduce tab:router --profile paper

Expected: s_rel is 1, 1/k and k; within one k the norms stand in that ratio. Norms compare within one k only. The paper
states neither text size, hidden layer, router scale nor c_R, so its norms can be compared in order of magnitude at best.
"""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.text.numbers import number
from zloss_paper.engine.claim import Claim, Finding, all_rows, cell
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured, Recipe
from zloss_paper.engine.table import Key, Row, Table, measured
from zloss_paper.engine.texts import WIKITEXT, TextSource
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.audit_rows import AuditRow, audit_table, paper_target
from zloss_paper.moe.router import RouterTableConfig, router_table

LABEL = "tab:router"
COLUMNS = ("s_rel", "delta_h_norm_mean")
TARGETS = (paper_target("GPT-2", WIKITEXT, 32),)
CHOICES = {
    "model_ids": "the checkpoint gpt2 on the hub",
    "corpus_variant": "the raw variant, wikitext-103-raw-v1",
    "num_sequences": "the first 32 blocks",
    "block_size": "256",
    "hidden_state_layer": "what the output head receives, after the final norm",
    "router_init_scale": "independent normal entries of standard deviation 0.02",
    "target_c_r": "log 16",
    "num_decisions": "8192, one per prediction",
    "seed_values": "k for the router of top-k",
}
MEAN = "token-layer mean"


@dataclass(frozen=True)
class RouterRecipeConfig:
    """The complete setting of the router table."""

    profile: Profile
    hidden: tuple[AuditRow, ...]
    """Where the hidden states come from."""
    projection: RouterTableConfig
    texts: tuple[TextSource, ...]


def configure(profile: Profile, overrides: Overrides) -> RouterRecipeConfig:
    """Hidden states of each model, and the router on them."""
    source = audit_table(LABEL, TARGETS, profile, overrides)
    return RouterRecipeConfig(profile, source.rows, RouterTableConfig(), source.texts)


def run(config: RouterRecipeConfig, bench: Workbench) -> Measured:
    """Nine rows per model."""
    rows = []
    for source in config.hidden:
        hidden = bench.hidden(source.audit)
        for line in router_table(hidden, config.projection):
            convention = line.convention.replace("_", " ").replace(" ", "-", 1)
            beside: dict[str, Key] = {"top_k": line.top_k, "convention": convention}
            key: dict[str, Key] = {"model": source.model, **beside} if len(config.hidden) > 1 else beside
            values = {"s_rel": line.relative, "delta_h_norm_mean": line.correction_norm}
            # Even on the paper's model its router's scale, c_R and decisions are unknown.
            unknown = "the paper does not state the router's scale, c_R or the number of decisions"
            rows.append(Row(key, measured(values), {}, (*source.deviations, unknown), beside))
    names = ", ".join(source.model for source in config.hidden)
    notes = (f"hidden states of {names}; norms are comparable within one k only",)
    return Measured(Table(tuple(rows)), notes=notes, texts=config.texts)


def _relative_scale(row: Row) -> tuple[bool, str]:
    top_k = int(row.key["top_k"])
    expected = {MEAN: 1.0, "active-route mean": 1 / top_k, "active-route sum": float(top_k)}[str(row.key["convention"])]
    found = cell(row, "s_rel")
    ok = abs(found.value - expected) <= found.half_unit + 1e-12
    return ok, f"k = {top_k}, {row.key['convention']}: {number(found.value)}"


def _norms_follow(table: Table) -> Finding:
    def test(row: Row) -> tuple[bool, str]:
        rest = {name: value for name, value in row.key.items() if name != "convention"}
        (mean,) = table.find(**rest, convention=MEAN)
        base, found, scale = cell(mean, "delta_h_norm_mean"), cell(row, "delta_h_norm_mean"), cell(row, "s_rel")
        slack = found.half_unit + scale.value * base.half_unit + 1e-6 * found.value
        ok = abs(found.value - scale.value * base.value) <= slack
        return ok, f"{row.name()}: {number(found.value)} = {number(found.value / base.value)} × {number(base.value)}"

    return all_rows(test)(table)


CLAIMS = (
    Claim(
        "relative_scales",
        "Relative to the token-layer mean, the active-route mean scales by 1/k and the active-route sum by k.",
        all_rows(_relative_scale),
    ),
    Claim(
        "norms_follow_the_scale",
        "Within one k the hidden correction norms stand in the ratio of the relative scales.",
        _norms_follow,
        "within 1e-6, and within the rounding of printed cells",
    ),
)

RECIPE = Recipe(
    label=LABEL,
    title="Router Z-loss conventions on a seeded 16-expert router",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=paper_table(LABEL, integer_keys=("top_k",)),
    claims=CLAIMS,
    choices=CHOICES,
)
