"""A table of router variants as a recipe, with our choices for what the paper leaves open about its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Recipe, RecipeResult
from zloss_paper.engine.table import Key
from zloss_paper.engine.workbench import Workbench
from zloss_paper.moe.claims import entropy_moves, matched_recovery, relative_scales, similar_ce
from zloss_paper.moe.setting import MoeTableConfig, moe_setting
from zloss_paper.moe.table import COLUMNS, run_moe_table

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


def moe_recipe(
    label: str,
    title: str,
    *,
    top_k: int,
    steps: Mapping[Profile, int],
    variants: Sequence[str],
    figure: str,
    choices: Mapping[str, str],
    variant_column: str = "router_loss",
    key: Mapping[str, Key] | None = None,
    remark: str = "",
) -> Recipe[MoeTableConfig]:
    """The recipe of one k: which router variants train for how many steps, and the same five claims.

    `variant_column` and `key` are the paper's names of what a line is about. `remark` is added to the readings of claims
    that the paper makes of another k.
    """

    def configure(profile: Profile, overrides: Overrides) -> MoeTableConfig:
        return moe_setting(top_k, steps, variants, profile, overrides)

    def run(config: MoeTableConfig, bench: Workbench) -> RecipeResult:
        return run_moe_table(config, bench, figure, key or {}, variant_column)

    return Recipe(
        label=label,
        title=title,
        columns=COLUMNS,
        configure=configure,
        run=run,
        paper=paper_table(label, integer_keys=("top_k",)),
        claims=(relative_scales(top_k), matched_recovery(), *entropy_moves(remark), similar_ce(remark)),
        choices=choices,
    )
