"""text:moe_top2: the companion of tab:moe with two routes per token, of which the paper prints the relative scales only.

    zloss reproduce text:moe_top2 --profile paper

Expected: s_rel 0.5, 1 and 2, and the same recovery by matching. Entropy, CE and load are ours alone.
"""

from __future__ import annotations

from zloss_paper.moe.recipe import moe_recipe
from zloss_paper.moe.setting import NAMES

TOP_K = 2
RECIPE = moe_recipe(
    "text:moe_top2",
    "Top-2 mixture of experts trained under three router losses, and matched",
    top_k=TOP_K,
    steps={"paper": 800, "cpu": 133, "smoke": 10},
    variants=tuple(variant for variant in NAMES if variant != "none"),
    figure="moe_top2",
    choices={
        "seed_values": "1, 2, 3 (cpu: 1, 2)",
        **dict.fromkeys(("ce", "ppl", "entropy", "load_cv"), "measured: the paper prints none for top-2"),
    },
    variant_column="convention",
    key={"top_k": TOP_K},
    remark="; the paper says it of top-4 only",
)
