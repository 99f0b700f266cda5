"""tab:fineweb_medium_ft: GPT-2 Medium continued on fresh FineWeb-Edu tokens for 9600 steps, coefficient 1e-4.

    zloss reproduce tab:fineweb_medium_ft --profile paper

Expected: PPL 21.60 … 21.62; A_p^99 23.6 under CE and Standard, 10.8 and 10.7 under Centered head and Centered; Standard has the
smallest Diag Z and p99 gradient norm. Cost: twelve runs of 39 M tokens on a model of 355 M parameters.
"""

from __future__ import annotations

from zloss_paper.engine.checks import together
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.paper_methods import CENTERED, STANDARD
from zloss_paper.engine.texts import FINEWEB
from zloss_paper.training.against_ce import COUNTS, all_smallest
from zloss_paper.training.arms import low_coefficient_arms
from zloss_paper.training.claims import (
    CENTERED_JOINT,
    HEAD_KEEPS_PPL,
    HEAD_LOWERS_BOTH,
    STANDARD_KEEPS_GAIN,
    small_ppl_differences,
)
from zloss_paper.training.paper_run import paper_run
from zloss_paper.training.quoted import quoted
from zloss_paper.training.recipe import training_recipe
from zloss_paper.training.small_training import LOW
from zloss_paper.training.table import TrainingTable

TABLE = TrainingTable(
    label="tab:fineweb_medium_ft",
    model="GPT-2 Medium",
    corpus=FINEWEB,
    columns=("ppl", "ppl_std", "diag_z", "p_z_999", "a_p_99", "grad_norm_p99", "c_aux"),
    arms=low_coefficient_arms(),
    paper=paper_run(
        "GPT-2 Medium",
        FINEWEB,
        steps=9600,
        warmup=480,
        blocks=160_000,
        valid_offset=220_000,
        valid_blocks=1024,
    ),
    seeds=(7, 8, 9),
    small=LOW,
)
CLAIMS = (
    small_ppl_differences((STANDARD, CENTERED)),
    HEAD_KEEPS_PPL,
    HEAD_LOWERS_BOTH,
    Claim(
        "standard_scalar_and_norm",
        "Standard Z-loss gives the largest reductions of Diag Z and of the p99 gradient norm before clipping.",
        together(all_smallest("diag_z", STANDARD), all_smallest("grad_norm_p99", STANDARD)),
        COUNTS,
    ),
    STANDARD_KEEPS_GAIN,
    CENTERED_JOINT,
    quoted(TABLE.label),
)
RECIPE = training_recipe(TABLE, CLAIMS)
