"""tab:moe: an 8-expert top-4 language model trained under six router losses, everything else equal.

    zloss reproduce tab:moe --profile paper
    zloss reproduce tab:moe text:moe_top2 --profile cpu --text train.txt

Expected: CE 5.835 … 5.836 for all six; entropy 1.714 without a router loss, 1.713, 1.725 and 1.756 at s_rel 0.25, 1 and 4; the
matched variants equal the token-layer mean. Cost of the cpu profile: 12 runs of 200 steps, about 25 minutes on one core.
"""

from __future__ import annotations

from zloss_paper.moe.recipe import CHOICES, moe_recipe
from zloss_paper.moe.setting import NAMES

RECIPE = moe_recipe(
    "tab:moe",
    "Top-4 mixture of experts trained under six router losses",
    top_k=4,
    steps={"paper": 1200, "cpu": 200, "smoke": 10},
    variants=tuple(NAMES),
    figure="moe_top4",
    choices=CHOICES,
)
