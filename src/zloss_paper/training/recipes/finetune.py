"""tab:finetune: GPT-2 continued on WikiText-103 for 4800 steps under four methods, coefficient 1e-4.

    zloss reproduce tab:finetune --profile paper

Expected: PPL 21.04 … 21.07 for all; P_Z^99.9 246.8 under CE, 21.8 under Standard, 20.3 under Centered; A_p^99 26.4, 26.3,
16.8. Cost: twelve runs of 39 M tokens.
"""

from __future__ import annotations

from zloss_paper.engine.paper_methods import CENTERED, STANDARD
from zloss_paper.engine.texts import WIKITEXT
from zloss_paper.training.arms import low_coefficient_arms
from zloss_paper.training.claims import (
    CENTERED_JOINT,
    HEAD_KEEPS_PPL,
    HEAD_LOWERS_BOTH,
    STANDARD_KEEPS_GAIN,
    STANDARD_TAIL,
    small_ppl_differences,
)
from zloss_paper.training.paper_run import paper_run
from zloss_paper.training.quoted import quoted
from zloss_paper.training.recipe import training_recipe
from zloss_paper.training.small_training import LOW
from zloss_paper.training.table import TrainingTable

TABLE = TrainingTable(
    label="tab:finetune",
    model="GPT-2",
    corpus=WIKITEXT,
    columns=("lambda_aux", "ppl", "ppl_std", "delta_ppl", "diag_z", "p_z_999", "a_p_99"),
    arms=low_coefficient_arms(),
    paper=paper_run(
        "GPT-2", WIKITEXT, steps=4800, warmup=240, micro_batch=16, accumulate=2, valid_blocks=512
    ),
    seeds=(1, 2, 3),
    small=LOW,
)  # fmt: skip
CLAIMS = (
    small_ppl_differences((STANDARD, CENTERED)),
    HEAD_KEEPS_PPL,
    HEAD_LOWERS_BOTH,
    STANDARD_TAIL,
    STANDARD_KEEPS_GAIN,
    CENTERED_JOINT,
    quoted(TABLE.label),
)
RECIPE = training_recipe(TABLE, CLAIMS)
