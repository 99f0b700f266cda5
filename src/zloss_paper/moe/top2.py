"""text:moe_top2: the companion of tab:moe with two routes per token, of which the paper prints the relative scales only.

    zloss reproduce text:moe_top2 --profile paper

Expected: s_rel 0.5, 1 and 2, and the same recovery by matching. Entropy, CE and load are ours alone.
"""

from __future__ import annotations

from dataclasses import replace

from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured, Recipe
from zloss_paper.engine.workbench import Workbench
from zloss_paper.moe.claims import entropy_moves, matched_recovery, relative_scales, similar_ce
from zloss_paper.moe.table import COLUMNS, NAMES, MoeTableConfig, moe_table, run_moe_table

LABEL = "text:moe_top2"
TOP_K = 2
STEPS: dict[Profile, int] = {"paper": 800, "cpu": 133, "smoke": 10}
FOR_TOP_4 = "; the paper says it of top-4 only"
VARIANTS = tuple(variant for variant in NAMES if variant != "none")


def configure(profile: Profile, overrides: Overrides) -> MoeTableConfig:
    """Three conventions and two matched variants."""
    return moe_table(TOP_K, STEPS, VARIANTS, profile, overrides)


def run(config: MoeTableConfig, bench: Workbench) -> Measured:
    """As tab:moe, in the columns of this passage."""
    measured = run_moe_table(config, bench, "moe_top2", {"top_k": TOP_K})
    rows = []
    for row in measured.table:
        key = {("convention" if name == "router_loss" else name): value for name, value in row.key.items()}
        beside = {name: value for name, value in key.items() if name != "seed"} if row.beside else {}
        rows.append(replace(row, key=key, beside=beside))
    return replace(measured, table=replace(measured.table, rows=tuple(rows)))


RECIPE = Recipe(
    label=LABEL,
    title="Top-2 mixture of experts trained under three router losses, and matched",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=paper_table(LABEL, integer_keys=("top_k",)),
    claims=(relative_scales(TOP_K), matched_recovery(), *entropy_moves(FOR_TOP_4), similar_ce(FOR_TOP_4)),
    choices={
        "seed_values": "1, 2, 3 (cpu: 1, 2)",
        **dict.fromkeys(("ce", "ppl", "entropy", "load_cv"), "measured: the paper prints none for top-2"),
    },
)
