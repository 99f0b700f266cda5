"""text:update_audit_fp16: the range of total-gradient errors when logits are stored in fp16.

    zloss reproduce text:update_audit_fp16 --profile paper

Expected: 0.4 … 0.5 % at the natural scale, 1.3 … 2.0 % at logit × 4, over models, corpora and scopes. Run it together with
tab:update_audit: the audit is the same.
"""

from __future__ import annotations

from zloss_paper.engine.claim import Claim, Finding, all_rows, cell
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured, Recipe
from zloss_paper.engine.row_claims import between
from zloss_paper.engine.table import Key, Row, Table, measured
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations.shared_audits import ImplementationConfig, audited_models, choices, update_rows
from zloss_paper.implementations.update_audit import CPU_BLOCKS, SCALES, STORAGES, TARGETS

LABEL = "text:update_audit_fp16"
COLUMNS = ("grad_rel_error_min", "grad_rel_error_max", "grad_rel_error_max_bf16")
SMALL = 0.025


def configure(profile: Profile, overrides: Overrides) -> ImplementationConfig:
    """The audits of tab:update_audit."""
    models = audited_models(LABEL, TARGETS, profile, overrides, cpu_blocks=CPU_BLOCKS)
    return ImplementationConfig(models, STORAGES, SCALES)


def run(config: ImplementationConfig, bench: Workbench) -> Measured:
    """One row per multiplier: the range over models, corpora and scopes."""
    audited = [row for model in config.models.rows for row in update_rows(bench, model.audit, config)]
    rows = []
    for scale in config.logit_scales:
        total = [row for row in audited if row.part == "total" and row.logit_scale == scale]
        fp16 = [row.grad_rel_error for row in total if row.storage == "fp16"]
        bf16 = [row.grad_rel_error for row in total if row.storage == "bf16"]
        values = {
            "grad_rel_error_min": min(fp16),
            "grad_rel_error_max": max(fp16),
            "grad_rel_error_max_bf16": max(bf16),
        }
        key: dict[str, Key] = {"storage": "fp16", "logit_scale": scale}
        deviations = dict.fromkeys(why for model in config.models.rows for why in model.deviations)
        rows.append(Row(key, measured(values), {}, tuple(deviations)))
    return Measured(Table(tuple(rows)), texts=config.models.texts)


def _small(row: Row) -> tuple[bool, str]:
    largest = cell(row, "grad_rel_error_max")
    return largest.low <= SMALL, f"logit × {row.key['logit_scale']}: at most {largest.value:.2%}"


def _rises(first: Row, second: Row) -> tuple[bool, str]:
    low, high = cell(first, "grad_rel_error_max"), cell(second, "grad_rel_error_max")
    return low.low < high.high, f"at most {low.value:.2%} at × 1, {high.value:.2%} at × 4"


def _grows(table: Table) -> Finding:
    return between("logit_scale", 1, 4, _rises)(table)


CLAIMS = (
    Claim("small", "With fp16 logits the gradient errors are small.", all_rows(_small), f"small: {SMALL:.1%} at most"),
    Claim("grows_with_scale", "With fp16 logits the gradient error rises from logit scale 1 to 4.", _grows),
)

RECIPE = Recipe(
    label=LABEL,
    title="The update audit with fp16 logits: range of total-gradient errors",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=paper_table(LABEL, integer_keys=("logit_scale",)),
    claims=CLAIMS,
    choices=choices(
        "corpora",
        "seed_values",
        scope="the range covers head and whole model",
        adam_dir_rel_error="in the result file of tab:update_audit",
    ),
)
