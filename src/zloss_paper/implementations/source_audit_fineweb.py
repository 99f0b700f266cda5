"""text:source_audit_fineweb: the source audit on GPT-2 logits from FineWeb-Edu.

    zloss reproduce text:source_audit_fineweb --profile paper

Expected: bf16 Δ_src 0.082, 0.143, 0.207 at logit × 1, 2, 4 with forward errors below 5e-4; fp16 0.008 … 0.027.
"""

from __future__ import annotations

from functools import partial

from zloss_paper.engine.audited_models import paper_target
from zloss_paper.engine.checks import Tested, all_lines
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.comparison import cell
from zloss_paper.engine.table import Line
from zloss_paper.engine.texts import FINEWEB
from zloss_paper.implementations.recipe import implementation_recipe
from zloss_paper.implementations.setting import choices
from zloss_paper.implementations.source_audit import (
    COLUMNS,
    FORWARD,
    SCALES,
    STORAGES,
    rises_with_scale,
    stored_16_bit,
)

LABEL = "text:source_audit_fineweb"
TARGETS = (paper_target("GPT-2", FINEWEB, 8),)


def _forward(line: Line) -> Tested:
    # The paper prints the bound alone.
    column = "rel_forward_error" if "rel_forward_error" in line.cells else "rel_forward_error_upper_bound"
    found = cell(line, column)
    return found.low <= FORWARD, f"{line.name()}: {found.value:.2g}"


CLAIMS = (
    Claim("forward_below", "With bf16 logits the forward errors are below 5e-4.", all_lines(_forward, storage="bf16")),
    Claim(
        "grows_with_scale",
        "With bf16 logits the source error rises with the logit scale.",
        rises_with_scale,
    ),
)

RECIPE = implementation_recipe(
    LABEL,
    "The source audit on FineWeb-Edu logits",
    partial(stored_16_bit, corpus=False),
    columns=COLUMNS,
    targets=TARGETS,
    storages=STORAGES,
    logit_scales=SCALES,
    claims=CLAIMS,
    choices=choices("model_ids", "block_size", "seed_values", num_sequences="the first 8 blocks"),
)
