"""tab:fineweb_ft: GPT-2 continued on FineWeb-Edu for 2400 steps, validated on disjoint blocks, coefficient 1e-4.

    zloss reproduce tab:fineweb_ft --profile paper

Expected: PPL 27.68 … 27.70; the centered head lowers P_Z^99.9 from 246.5 to 25.6 and A_p^99 from 26.6 to 15.9; Standard lowers
the first alone. Cost: twelve runs of 19.7 M tokens.
"""

from __future__ import annotations

from zloss_paper.engine.claim import Claim
from zloss_paper.engine.paper_methods import CENTERED, STANDARD
from zloss_paper.engine.texts import FINEWEB
from zloss_paper.training.against_ce import against_ce, higher
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

OFFSET = 70_000
TABLE = TrainingTable(
    label="tab:fineweb_ft",
    model="GPT-2",
    corpus=FINEWEB,
    columns=("ppl", "ppl_std", "diag_z", "p_z_999", "a_p_99", "grad_norm_p99", "c_aux"),
    arms=low_coefficient_arms(),
    paper=paper_run(
        "GPT-2",
        FINEWEB,
        steps=2400,
        warmup=120,
        micro_batch=16,
        accumulate=2,
        blocks=OFFSET,
        valid_offset=OFFSET,
        valid_blocks=512,
    ),
    seeds=(1, 2, 3),
    small=LOW,
)
CLAIMS = (
    HEAD_KEEPS_PPL,
    HEAD_LOWERS_BOTH,
    small_ppl_differences((CENTERED,)),
    CENTERED_JOINT,
    STANDARD_TAIL,
    STANDARD_KEEPS_GAIN,
    Claim(
        "standard_ppl_worse",
        "Standard Z-loss is worse in PPL than CE at this coefficient.",
        against_ce((STANDARD,), higher("ppl")),
    ),
    quoted(TABLE.label),
)
RECIPE = training_recipe(
    TABLE,
    CLAIMS,
    choices={
        "micro_batch": "16, as in the WikiText-103 run",
        "grad_accumulation": "2, as in the WikiText-103 run",
        "train_sequences": "70,000: all that lie before the validation blocks, so that 76,800 sequences reuse some of them",
    },
)
