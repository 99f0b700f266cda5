"""text:source_audit_fineweb: the source audit on GPT-2 logits from FineWeb-Edu.

    zloss reproduce text:source_audit_fineweb --profile paper

Expected: bf16 Δ_src 0.082, 0.143, 0.207 at logit × 1, 2, 4 with forward errors below 5e-4; fp16 0.008 … 0.027.
"""

from __future__ import annotations

from zloss_paper.engine.claim import Claim, all_rows, cell
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured, Recipe
from zloss_paper.engine.table import Row, Table
from zloss_paper.engine.texts import FINEWEB
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.audit_rows import paper_target
from zloss_paper.implementations.shared_audits import ImplementationConfig, audited_models, choices, source_rows
from zloss_paper.implementations.source_audit import COLUMNS, FORWARD, SCALES, STORAGES, rises_with_scale, source_line

LABEL = "text:source_audit_fineweb"
TARGETS = (paper_target("GPT-2", FINEWEB, 8),)


def configure(profile: Profile, overrides: Overrides) -> ImplementationConfig:
    """The model, and storage × multiplier."""
    return ImplementationConfig(audited_models(LABEL, TARGETS, profile, overrides), STORAGES, SCALES)


def run(config: ImplementationConfig, bench: Workbench) -> Measured:
    """Rows of 16-bit storage."""
    audited = [(model, row) for model in config.models.rows for row in source_rows(bench, model.audit, config)]
    rows = tuple(source_line(model, row) for model, row in audited if row.storage != "fp32")
    return Measured(Table(rows), texts=config.models.texts)


def _forward(row: Row) -> tuple[bool, str]:
    # The paper prints the bound alone.
    column = "rel_forward_error" if "rel_forward_error" in row.cells else "rel_forward_error_upper_bound"
    found = cell(row, column)
    return found.low <= FORWARD, f"{row.name()}: {found.value:.2g}"


CLAIMS = (
    Claim("forward_below", "With bf16 logits the forward errors are below 5e-4.", all_rows(_forward, storage="bf16")),
    Claim(
        "grows_with_scale",
        "With bf16 logits the source error rises with the logit scale.",
        rises_with_scale,
    ),
)

RECIPE = Recipe(
    label=LABEL,
    title="The source audit on FineWeb-Edu logits",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=paper_table(LABEL, integer_keys=("logit_scale",)),
    claims=CLAIMS,
    choices=choices("model_ids", "block_size", "seed_values", num_sequences="the first 8 blocks"),
)
