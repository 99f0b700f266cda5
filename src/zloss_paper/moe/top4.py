"""tab:moe: an 8-expert top-4 language model trained under six router losses, everything else equal.

    zloss reproduce tab:moe --profile paper
    zloss reproduce tab:moe text:moe_top2 --profile cpu --text train.txt

Expected: CE 5.835 … 5.836 for all six; entropy 1.714 without a router loss, 1.713, 1.725 and 1.756 at s_rel 0.25, 1 and 4; the
matched variants equal the token-layer mean. Cost of the cpu profile: 12 runs of 200 steps, about 25 minutes on one core.
"""

from __future__ import annotations

from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured, Recipe
from zloss_paper.engine.workbench import Workbench
from zloss_paper.moe.claims import entropy_moves, matched_recovery, relative_scales, similar_ce
from zloss_paper.moe.table import CHOICES, COLUMNS, NAMES, MoeTableConfig, moe_table, run_moe_table

LABEL = "tab:moe"
TOP_K = 4
STEPS: dict[Profile, int] = {"paper": 1200, "cpu": 200, "smoke": 10}


def configure(profile: Profile, overrides: Overrides) -> MoeTableConfig:
    """Six variants."""
    return moe_table(TOP_K, STEPS, tuple(NAMES), profile, overrides)


def run(config: MoeTableConfig, bench: Workbench) -> Measured:
    """A row per variant, and per variant and seed."""
    return run_moe_table(config, bench, "moe_top4", {})


RECIPE = Recipe(
    label=LABEL,
    title="Top-4 mixture of experts trained under six router losses",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=paper_table(LABEL),
    claims=(relative_scales(TOP_K), matched_recovery(), *entropy_moves(), similar_ce()),
    choices=CHOICES,
)
