"""The source error of stored logits after transport: parameter gradients and Adam's first direction, bf16 and fp16.

    zloss reproduce tab:update_audit text:update_audit_fp16 --profile paper

Both recipes read one audit. Cost: 8 blocks; per block and multiplier one forward pass and six backward passes, and six
gradients of the model in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zloss.results.implementation_audit import UpdateErrors
from zloss_paper.engine.audited_models import AuditedModel, paper_target
from zloss_paper.engine.claims import Claim, Tested, all_lines, between, cell, line_test, rises
from zloss_paper.engine.inputs import FINEWEB, WIKITEXT
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Line, Table, cells_from, cells_of
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations.recipe import (
    ImplementationConfig,
    audit_line,
    audit_updates,
    implementation_recipe,
    run_audits,
    shared,
)

COLUMNS = ("grad_rel_error", "grad_cosine", "adam_dir_rel_error", "z_grad_rel_error")
VISIBLE = 5e-3
SMALL = 0.025
update_recipe = partial(
    implementation_recipe,
    targets=[paper_target(model, corpus, 8) for model in ("GPT-2", "GPT-2 Medium") for corpus in (WIKITEXT, FINEWEB)],
    storages=("bf16", "fp16"),
    logit_scales=(1, 4),
    cpu_blocks=4,
)
"""The recipe of a label, with what both share."""


def bf16_lines(model: AuditedModel, audited: Sequence[UpdateErrors]) -> list[Line]:
    """Head and whole model by multiplier: the total gradient, with Δ_θ of Z alone next to it."""
    bf16 = [found for found in audited if found.storage == "bf16"]
    alone = {(found.scope, found.logit_scale): found.grad_rel_error for found in bf16 if found.part == "z"}
    lines = []
    for found in bf16:
        if found.part == "total":
            cells = cells_from(found, {column: column for column in COLUMNS[:3]})
            cells |= cells_of({COLUMNS[3]: alone[found.scope, found.logit_scale]})
            lines.append(audit_line(model, {"scope": found.scope, "logit_scale": int(found.logit_scale)}, cells))
    return lines


def run_fp16(config: ImplementationConfig, bench: Workbench) -> RecipeResult:
    """One line per multiplier: the range over models, corpora and scopes."""
    audited = [found for model in config.models.rows for found in shared(audit_updates, bench, model.audit, config)]
    deviations = tuple(dict.fromkeys(why for model in config.models.rows for why in model.deviations))
    lines = []
    for scale in config.logit_scales:
        total = [found for found in audited if found.part == "total" and found.logit_scale == scale]
        fp16, bf16 = (
            [each.grad_rel_error for each in total if each.storage == storage and each.grad_rel_error is not None]
            for storage in ("fp16", "bf16")
        )
        values = {
            "grad_rel_error_min": min(fp16),
            "grad_rel_error_max": max(fp16),
            "grad_rel_error_max_bf16": max(bf16),
        }
        lines.append(Line({"storage": "fp16", "logit_scale": scale}, cells_of(values), {}, deviations))
    return RecipeResult(Table(tuple(lines)), texts=config.models.texts)


CLAIMS = (
    Claim(
        "visible_after_transport",
        "The source error of bf16 logits is still visible in the parameter gradients.",
        all_lines(line_test({"grad_rel_error": ""}, lambda found: found.high >= VISIBLE)),
        f"visible: a relative error of {VISIBLE:.1%} at least",
    ),
    Claim(
        "adam_magnifies",
        "The error of the first Adam direction is larger than that of the gradient.",
        all_lines(
            line_test(
                {"grad_rel_error": "gradient", "adam_dir_rel_error": "Adam direction"},
                lambda grad, adam: adam.high > grad.low,
            )
        ),
    ),
    Claim(
        "grows_with_scale",
        "The gradient error rises from logit scale 1 to 4.",
        between("logit_scale", 1, 4, rises("grad_rel_error")),
    ),
)


def _small(line: Line) -> Tested:
    largest = cell(line, "grad_rel_error_max")
    return largest.low <= SMALL, f"logit × {line.key['logit_scale']}: at most {largest.value:.2%}"


def _rises(name: str, first: Line, second: Line) -> Tested:
    low, high = cell(first, "grad_rel_error_max"), cell(second, "grad_rel_error_max")
    return low.low < high.high, f"at most {low.value:.2%} at × 1, {high.value:.2%} at × 4"


FP16_CLAIMS = (
    Claim("small", "With fp16 logits the gradient errors are small.", all_lines(_small), f"small: {SMALL:.1%} at most"),
    Claim(
        "grows_with_scale",
        "With fp16 logits the gradient error rises from logit scale 1 to 4.",
        between("logit_scale", 1, 4, _rises),
    ),
)
RECIPES = (
    # Expected: total-gradient errors of 3.1 … 4.1 % at the natural scale and 7.9 … 16.4 % at logit × 4, head and whole model;
    # first Adam directions off by 12.8 … 16.3 % and 18.1 … 25.9 %.
    update_recipe(
        "tab:update_audit",
        "The source error of bf16 logits after transport: gradients and first Adam direction",
        run_audits(audit_updates, bf16_lines, details="update_rows"),
        columns=COLUMNS,
        claims=CLAIMS,
    ),
    # Expected: 0.4 … 0.5 % at the natural scale, 1.3 … 2.0 % at logit × 4, over models, corpora and scopes.
    update_recipe(
        "text:update_audit_fp16",
        "The update audit with fp16 logits: range of total-gradient errors",
        run_fp16,
        columns=("grad_rel_error_min", "grad_rel_error_max", "grad_rel_error_max_bf16"),
        claims=FP16_CLAIMS,
    ),
)
