"""text:fused_audit_medium: the fused-kernel audit on GPT-2 Medium logits.

    zloss reproduce text:fused_audit_medium --profile paper

Expected: bf16 Δ_Z 0.050 and 0.164 (WikiText-103), 0.0696 and 0.186 (FineWeb-Edu) at logit × 1 and 4; Δ_tot 0.033 … 0.134;
fp32 below 1e-6.
"""

from __future__ import annotations

from zloss_paper.engine.claim import Claim
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured, Recipe
from zloss_paper.engine.row_claims import between, rises
from zloss_paper.engine.table import Table
from zloss_paper.engine.texts import FINEWEB, WIKITEXT
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.audit_rows import paper_target
from zloss_paper.implementations.shared_audits import ImplementationConfig, audited_models, choices, kernel_rows
from zloss_paper.implementations.triton_fused import COLUMNS, KERNEL, SCALES, STORAGES, kernel_line, tokens_per_block

LABEL = "text:fused_audit_medium"
TARGETS = (paper_target("GPT-2 Medium", WIKITEXT, 8), paper_target("GPT-2 Medium", FINEWEB, 8))


def configure(profile: Profile, overrides: Overrides) -> ImplementationConfig:
    """The models, storage × multiplier."""
    models = audited_models(LABEL, TARGETS, profile, overrides)
    return ImplementationConfig(models, STORAGES, SCALES, tokens_per_block=tokens_per_block(profile))


def run(config: ImplementationConfig, bench: Workbench) -> Measured:
    """Rows of fp32 and bf16 storage."""
    audited = [(model, row) for model in config.models.rows for row in kernel_rows(bench, model.audit, config, KERNEL)]
    rows = tuple(kernel_line(model, row) for model, row in audited if row.storage != "fp16")
    return Measured(Table(rows), texts=config.models.texts)


CLAIMS = (
    Claim(
        "grows_with_scale",
        "With bf16 logits the error of the Z source rises from logit scale 1 to 4 on both corpora.",
        lambda table: between("logit_scale", 1, 4, rises("delta_z", "Δ_Z"))(Table(table.find(storage="bf16"))),
    ),
)

RECIPE = Recipe(
    label=LABEL,
    title="The fused-kernel audit on GPT-2 Medium logits",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=paper_table(LABEL, integer_keys=("logit_scale",)),
    claims=CLAIMS,
    choices=choices("model_ids", "block_size", "lambda_value", "seed_values", num_sequences="the first 8 blocks"),
)
