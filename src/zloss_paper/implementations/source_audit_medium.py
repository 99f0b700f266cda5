"""text:source_audit_medium: the source audit on GPT-2 Medium logits from both corpora.

    zloss reproduce text:source_audit_medium --profile paper

Expected: bf16 Δ_src 0.057 and 0.171 (WikiText-103), 0.0687 and 0.193 (FineWeb-Edu) at logit × 1 and 4, with forward
errors of about 2e-4; fp16 0.007 … 0.026.
"""

from __future__ import annotations

from zloss_paper.engine.claim import Claim, all_rows
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured, Recipe
from zloss_paper.engine.table import Table
from zloss_paper.engine.texts import FINEWEB, WIKITEXT
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.audit_rows import paper_target
from zloss_paper.implementations.shared_audits import ImplementationConfig, audited_models, choices, source_rows
from zloss_paper.implementations.source_audit import (
    COLUMNS,
    SCALES,
    STORAGES,
    UNDERSTATES,
    rises_with_scale,
    source_line,
    understates,
)

LABEL = "text:source_audit_medium"
TARGETS = (paper_target("GPT-2 Medium", WIKITEXT, 8), paper_target("GPT-2 Medium", FINEWEB, 8))


def configure(profile: Profile, overrides: Overrides) -> ImplementationConfig:
    """The models, and storage × multiplier."""
    return ImplementationConfig(audited_models(LABEL, TARGETS, profile, overrides), STORAGES, SCALES)


def run(config: ImplementationConfig, bench: Workbench) -> Measured:
    """Rows of 16-bit storage by corpus."""
    audited = [(model, row) for model in config.models.rows for row in source_rows(bench, model.audit, config)]
    rows = tuple(source_line(model, row, corpus=True) for model, row in audited if row.storage != "fp32")
    return Measured(Table(rows), texts=config.models.texts)


CLAIMS = (
    Claim(
        "forward_understates",
        "Agreement of the forward scalar understates the error of the Z source for GPT-2 Medium too.",
        all_rows(understates, storage="bf16"),
        f"Δ_src at least {UNDERSTATES} times the forward error",
    ),
    Claim(
        "grows_with_scale",
        "With bf16 logits the source error rises from logit scale 1 to 4 on both corpora.",
        rises_with_scale,
    ),
)

RECIPE = Recipe(
    label=LABEL,
    title="The source audit on GPT-2 Medium logits",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=paper_table(LABEL, integer_keys=("logit_scale",)),
    claims=CLAIMS,
    choices=choices("model_ids", "block_size", "seed_values", num_sequences="the first 8 blocks"),
)
