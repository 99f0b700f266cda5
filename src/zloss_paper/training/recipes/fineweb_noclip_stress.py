"""tab:fineweb_noclip_stress: GPT-2 Medium on FineWeb-Edu without effective clipping, 900 steps, coefficient 1e-3.

    zloss reproduce tab:fineweb_noclip_stress --profile paper

Expected: p99 gradient norms of 18.9, 23.0 and 13.0 for the raw-logit methods, 4.6 for CE, Centered head and Centered. Cost:
eighteen runs of 3.7 M tokens on a model of 355 M parameters.
"""

from __future__ import annotations

from zloss.train.stress import EFFECTIVELY_UNCLIPPED
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.paper_methods import CENTERED, CENTERED_HEAD, RAW_METHODS, STANDARD
from zloss_paper.engine.texts import FINEWEB
from zloss_paper.training.against_ce import COUNTS, NEAR_CE, against_ce, all_smallest, higher, lower, near_ce
from zloss_paper.training.arms import stress_arms
from zloss_paper.training.claims import HEAD_KEEPS_PPL, HEAD_LOWERS_BOTH
from zloss_paper.training.each_run import all_finite
from zloss_paper.training.paper_run import paper_run
from zloss_paper.training.quoted import quoted
from zloss_paper.training.recipe import training_recipe
from zloss_paper.training.small_training import UNCLIPPED
from zloss_paper.training.table import TrainingTable

TABLE = TrainingTable(
    label="tab:fineweb_noclip_stress",
    model="GPT-2 Medium",
    corpus=FINEWEB,
    columns=("ppl", "ppl_std", "p_z_999", "a_p_99", "grad_norm_p99", "grad_norm_max"),
    arms=stress_arms(1e-3),
    paper=paper_run(
        "GPT-2 Medium",
        FINEWEB,
        steps=900,
        warmup=90,
        lr=2e-4,
        clip=EFFECTIVELY_UNCLIPPED,
        blocks=160_000,
        valid_offset=220_000,
        valid_blocks=1024,
    ),
    seeds=(1, 2, 3),
    small=UNCLIPPED,
    figure=True,
)
CLAIMS = (
    Claim(
        "standard_smallest_tail",
        "Standard Z-loss gives the smallest log-normalizer tail of all methods.",
        all_smallest("p_z_999", STANDARD),
        COUNTS,
    ),
    Claim(
        "raw_lower_tail_keep_gain",
        "Standard, Factorized and Gain-aware Z-loss lower the log-normalizer tail and leave the gain tail near CE.",
        against_ce(RAW_METHODS, lower("p_z_999"), near_ce("a_p_99")),
        f"near: within {NEAR_CE:.0%}; {COUNTS}",
    ),
    Claim(
        "raw_gradient_tails",
        "Their p99 and maximum gradient norms rise to several times those of CE.",
        against_ce(RAW_METHODS, higher("grad_norm_p99", 2), higher("grad_norm_max", 2)),
        "several: at least twice",
    ),
    Claim(
        "centered_joint_at_ce_norm",
        "Centered Z-loss lowers both tails with p99 and maximum gradient norms at the CE scale.",
        against_ce((CENTERED,), lower("p_z_999"), lower("a_p_99"), near_ce("grad_norm_p99"), near_ce("grad_norm_max")),
        f"at the scale: within {NEAR_CE:.0%}; {COUNTS}",
    ),
    Claim("centered_ppl_cost", "Centered Z-loss costs PPL in this setting.", against_ce((CENTERED,), higher("ppl"))),
    HEAD_KEEPS_PPL,
    HEAD_LOWERS_BOTH,
    Claim(
        "centered_head_no_outliers",
        "The centered head brings no update outliers: its p99 and maximum gradient norms are those of CE.",
        against_ce((CENTERED_HEAD,), near_ce("grad_norm_p99"), near_ce("grad_norm_max")),
        f"those of CE: within {NEAR_CE:.0%}",
    ),
    all_finite("No run produced a gradient with NaN or Inf.", "nonfinite_gradient"),
    quoted(TABLE.label),
)
RECIPE = training_recipe(TABLE, CLAIMS)
