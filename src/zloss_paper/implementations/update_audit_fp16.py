"""text:update_audit_fp16: the range of total-gradient errors when logits are stored in fp16.

    zloss reproduce text:update_audit_fp16 --profile paper

Expected: 0.4 … 0.5 % at the natural scale, 1.3 … 2.0 % at logit × 4, over models, corpora and scopes. Run it together with
tab:update_audit: the audit is the same.
"""

from __future__ import annotations

from zloss_paper.engine.checks import Tested, all_lines, between
from zloss_paper.engine.claim import Claim, Judgement
from zloss_paper.engine.comparison import cell
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Key, Line, Table, cells_of
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations.recipe import implementation_recipe
from zloss_paper.implementations.setting import ImplementationConfig, choices
from zloss_paper.implementations.shared_audits import shared_update_audit
from zloss_paper.implementations.update_audit import CPU_BLOCKS, SCALES, STORAGES, TARGETS

LABEL = "text:update_audit_fp16"
COLUMNS = ("grad_rel_error_min", "grad_rel_error_max", "grad_rel_error_max_bf16")
SMALL = 0.025


def run(config: ImplementationConfig, bench: Workbench) -> RecipeResult:
    """One line per multiplier: the range over models, corpora and scopes."""
    audited = [found for model in config.models.rows for found in shared_update_audit(bench, model.audit, config)]
    lines = []
    for scale in config.logit_scales:
        total = [found for found in audited if found.part == "total" and found.logit_scale == scale]
        fp16 = [found.grad_rel_error for found in total if found.storage == "fp16"]
        bf16 = [found.grad_rel_error for found in total if found.storage == "bf16"]
        values = {
            "grad_rel_error_min": min(fp16),
            "grad_rel_error_max": max(fp16),
            "grad_rel_error_max_bf16": max(bf16),
        }
        key: dict[str, Key] = {"storage": "fp16", "logit_scale": scale}
        deviations = dict.fromkeys(why for model in config.models.rows for why in model.deviations)
        lines.append(Line(key, cells_of(values), {}, tuple(deviations)))
    return RecipeResult(Table(tuple(lines)), texts=config.models.texts)


def _small(line: Line) -> Tested:
    largest = cell(line, "grad_rel_error_max")
    return largest.low <= SMALL, f"logit × {line.key['logit_scale']}: at most {largest.value:.2%}"


def _rises(first: Line, second: Line) -> Tested:
    low, high = cell(first, "grad_rel_error_max"), cell(second, "grad_rel_error_max")
    return low.low < high.high, f"at most {low.value:.2%} at × 1, {high.value:.2%} at × 4"


def _grows(table: Table) -> Judgement:
    return between("logit_scale", 1, 4, _rises)(table)


CLAIMS = (
    Claim("small", "With fp16 logits the gradient errors are small.", all_lines(_small), f"small: {SMALL:.1%} at most"),
    Claim("grows_with_scale", "With fp16 logits the gradient error rises from logit scale 1 to 4.", _grows),
)

RECIPE = implementation_recipe(
    LABEL,
    "The update audit with fp16 logits: range of total-gradient errors",
    run,
    columns=COLUMNS,
    targets=TARGETS,
    storages=STORAGES,
    logit_scales=SCALES,
    claims=CLAIMS,
    cpu_blocks=CPU_BLOCKS,
    choices=choices(
        "corpora",
        "seed_values",
        scope="the range covers head and whole model",
        adam_dir_rel_error="in the result file of tab:update_audit",
    ),
)
