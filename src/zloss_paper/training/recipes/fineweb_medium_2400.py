"""text:fineweb_medium_2400: GPT-2 Medium on disjoint FineWeb-Edu blocks for 2400 steps, a run the paper describes only.

    zloss reproduce text:fineweb_medium_2400 --profile paper

The protocol states micro-batch 8, accumulation 2, 120 steps of warm-up, 9.83 M tokens, 65,536 validation predictions and a seed
set of its own; no numbers are printed. Its claims are those that the paper makes of its FineWeb-Edu runs together. The paper
does not state its pool and offset: they are those of the GPT-2 run on disjoint blocks. Cost: twelve runs on a model of
355 M parameters.
"""

from __future__ import annotations

from dataclasses import replace

from zloss_paper.engine.claim import Claim
from zloss_paper.engine.paper_methods import CENTERED, CENTERED_HEAD
from zloss_paper.engine.texts import FINEWEB
from zloss_paper.training.against_ce import COUNTS, against_ce, lower
from zloss_paper.training.claims import STANDARD_KEEPS_GAIN, STANDARD_TAIL
from zloss_paper.training.paper_run import paper_run
from zloss_paper.training.recipe import training_recipe
from zloss_paper.training.recipes.fineweb_ft import TABLE as DISJOINT_BLOCKS

TABLE = replace(
    DISJOINT_BLOCKS,
    label="text:fineweb_medium_2400",
    model="GPT-2 Medium",
    paper=paper_run(
        "GPT-2 Medium",
        FINEWEB,
        steps=2400,
        warmup=120,
        blocks=DISJOINT_BLOCKS.paper.blocks,
        valid_offset=DISJOINT_BLOCKS.paper.valid_offset,
        valid_blocks=256,
    ),
    seeds=(4, 5, 6),
)
CLAIMS = (
    Claim(
        "centered_variants_lower_gain",
        "Centered variants lower the gain tail.",
        against_ce((CENTERED_HEAD, CENTERED), lower("a_p_99")),
        COUNTS,
    ),
    STANDARD_TAIL,
    STANDARD_KEEPS_GAIN,
)
RECIPE = training_recipe(
    TABLE,
    CLAIMS,
    title="GPT-2 Medium continued pretraining on disjoint FineWeb-Edu blocks, 2400 steps (described, not printed)",
    printed=False,
)
