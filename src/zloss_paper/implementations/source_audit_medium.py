"""text:source_audit_medium: the source audit on GPT-2 Medium logits from both corpora.

    zloss reproduce text:source_audit_medium --profile paper

Expected: bf16 Δ_src 0.057 and 0.171 (WikiText-103), 0.0687 and 0.193 (FineWeb-Edu) at logit × 1 and 4, with forward
errors of about 2e-4; fp16 0.007 … 0.026.
"""

from __future__ import annotations

from functools import partial

from zloss_paper.engine.audited_models import paper_target
from zloss_paper.engine.checks import all_lines
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.texts import FINEWEB, WIKITEXT
from zloss_paper.implementations.recipe import implementation_recipe
from zloss_paper.implementations.setting import choices
from zloss_paper.implementations.source_audit import (
    COLUMNS,
    SCALES,
    STORAGES,
    UNDERSTATES,
    rises_with_scale,
    stored_16_bit,
    understates,
)

LABEL = "text:source_audit_medium"
TARGETS = (paper_target("GPT-2 Medium", WIKITEXT, 8), paper_target("GPT-2 Medium", FINEWEB, 8))


CLAIMS = (
    Claim(
        "forward_understates",
        "Agreement of the forward scalar understates the error of the Z source for GPT-2 Medium too.",
        all_lines(understates, storage="bf16"),
        f"Δ_src at least {UNDERSTATES} times the forward error",
    ),
    Claim(
        "grows_with_scale",
        "With bf16 logits the source error rises from logit scale 1 to 4 on both corpora.",
        rises_with_scale,
    ),
)

RECIPE = implementation_recipe(
    LABEL,
    "The source audit on GPT-2 Medium logits",
    partial(stored_16_bit, corpus=True),
    columns=COLUMNS,
    targets=TARGETS,
    storages=STORAGES,
    logit_scales=SCALES,
    claims=CLAIMS,
    choices=choices("model_ids", "block_size", "seed_values", num_sequences="the first 8 blocks"),
)
