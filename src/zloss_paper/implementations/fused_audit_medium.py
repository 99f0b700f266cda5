"""text:fused_audit_medium: the fused-kernel audit on GPT-2 Medium logits.

    zloss reproduce text:fused_audit_medium --profile paper

Expected: bf16 Δ_Z 0.050 and 0.164 (WikiText-103), 0.0696 and 0.186 (FineWeb-Edu) at logit × 1 and 4; Δ_tot 0.033 … 0.134;
fp32 below 1e-6.
"""

from __future__ import annotations

from zloss_paper.engine.audited_models import paper_target
from zloss_paper.engine.checks import between, rises
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Table
from zloss_paper.engine.texts import FINEWEB, WIKITEXT
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations.recipe import implementation_recipe
from zloss_paper.implementations.setting import ImplementationConfig, choices, tokens_per_block
from zloss_paper.implementations.shared_audits import shared_kernel_audit
from zloss_paper.implementations.triton_fused import COLUMNS, KERNEL, SCALES, STORAGES, kernel_line

LABEL = "text:fused_audit_medium"
TARGETS = (paper_target("GPT-2 Medium", WIKITEXT, 8), paper_target("GPT-2 Medium", FINEWEB, 8))


def run(config: ImplementationConfig, bench: Workbench) -> RecipeResult:
    """Lines of fp32 and bf16 storage."""
    audited = [
        (model, found)
        for model in config.models.rows
        for found in shared_kernel_audit(bench, model.audit, config, KERNEL)
    ]
    lines = tuple(kernel_line(model, found) for model, found in audited if found.storage != "fp16")
    return RecipeResult(Table(lines), texts=config.models.texts)


CLAIMS = (
    Claim(
        "grows_with_scale",
        "With bf16 logits the error of the Z source rises from logit scale 1 to 4 on both corpora.",
        lambda table: between("logit_scale", 1, 4, rises("delta_z", "Δ_Z"))(Table(table.find(storage="bf16"))),
    ),
)

RECIPE = implementation_recipe(
    LABEL,
    "The fused-kernel audit on GPT-2 Medium logits",
    run,
    columns=COLUMNS,
    targets=TARGETS,
    storages=STORAGES,
    logit_scales=SCALES,
    claims=CLAIMS,
    tokens_per_block=tokens_per_block,
    choices=choices("model_ids", "block_size", "lambda_value", "seed_values", num_sequences="the first 8 blocks"),
)
