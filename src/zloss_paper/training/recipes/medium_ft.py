"""tab:medium_ft: GPT-2 Medium continued on WikiText-103 for 2400 steps, coefficient 1e-4.

    zloss reproduce tab:medium_ft --profile paper

Expected: PPL 17.39 under CE, 17.36 under Standard, 17.33 under Centered; A_p^99 21.7, 21.6, 11.3. Cost: twelve runs of 9.8 M
tokens on a model of 355 M parameters.
"""

from __future__ import annotations

from zloss_paper.engine.claim import Claim
from zloss_paper.engine.paper_methods import CENTERED, STANDARD
from zloss_paper.engine.texts import WIKITEXT
from zloss_paper.training.against_ce import against_ce, all_smallest, lower
from zloss_paper.training.arms import low_coefficient_arms
from zloss_paper.training.claims import CENTERED_JOINT, HEAD_LOWERS_BOTH, STANDARD_KEEPS_GAIN, STANDARD_TAIL
from zloss_paper.training.paper_run import paper_run
from zloss_paper.training.quoted import quoted
from zloss_paper.training.recipe import training_recipe
from zloss_paper.training.small_training import LOW
from zloss_paper.training.table import TrainingTable

TABLE = TrainingTable(
    label="tab:medium_ft",
    model="GPT-2 Medium",
    corpus=WIKITEXT,
    columns=("ppl", "ppl_std", "diag_z", "p_z_999", "a_p_99"),
    arms=low_coefficient_arms(),
    paper=paper_run("GPT-2 Medium", WIKITEXT, steps=2400, warmup=120, valid_blocks=256),
    seeds=(1, 2, 3),
    small=LOW,
)
CLAIMS = (
    Claim(
        "standard_improves_ppl",
        "Standard Z-loss improves PPL over CE.",
        against_ce((STANDARD,), lower("ppl")),
    ),
    STANDARD_TAIL,
    STANDARD_KEEPS_GAIN,
    HEAD_LOWERS_BOTH,
    Claim(
        "centered_best_ppl",
        "Centered Z-loss has the best mean PPL of the four.",
        all_smallest("ppl", CENTERED),
    ),
    CENTERED_JOINT,
    quoted(TABLE.label),
)
RECIPE = training_recipe(TABLE, CLAIMS)
