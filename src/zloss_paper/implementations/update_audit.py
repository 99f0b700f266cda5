"""tab:update_audit: the source error of bf16 logits in parameter gradients and in Adam's first direction.

    zloss reproduce tab:update_audit --profile paper

Expected: total-gradient errors of 3.1 … 4.1 % at the natural scale and 7.9 … 16.4 % at logit × 4, head and whole model;
first Adam directions off by 12.8 … 16.3 % and 18.1 … 25.9 %. Cost: 8 blocks; per block and multiplier one forward pass and
six backward passes, and six gradients of the model in memory.
"""

from __future__ import annotations

from zloss.audit.implementation.source import Storage
from zloss.audit.implementation.update import UpdateLine
from zloss.report.text.numbers import number
from zloss_paper.engine.audited_models import AuditedModel, paper_target
from zloss_paper.engine.checks import Tested, all_lines, between, rises
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.comparison import cell
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Key, Line, Table, cells_of
from zloss_paper.engine.texts import FINEWEB, WIKITEXT
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations.lines import audit_details
from zloss_paper.implementations.recipe import implementation_recipe
from zloss_paper.implementations.setting import ImplementationConfig, choices
from zloss_paper.implementations.shared_audits import shared_update_audit

LABEL = "tab:update_audit"
COLUMNS = ("grad_rel_error", "grad_cosine", "adam_dir_rel_error", "z_grad_rel_error")
TARGETS = tuple(paper_target(model, corpus, 8) for model in ("GPT-2", "GPT-2 Medium") for corpus in (WIKITEXT, FINEWEB))
STORAGES: tuple[Storage, ...] = ("bf16", "fp16")
SCALES = (1, 4)
CPU_BLOCKS = 4
VISIBLE = 5e-3


def run(config: ImplementationConfig, bench: Workbench) -> RecipeResult:
    """Head and whole model by multiplier, bf16; everything else in the JSON file."""
    lines, details = [], []
    for model in config.models.rows:
        audited = shared_update_audit(bench, model.audit, config)
        details += audit_details(model, audited)
        lines += update_lines(model, audited, "bf16")
    return RecipeResult(Table(tuple(lines)), texts=config.models.texts, details={"update_rows": details})


def update_lines(model: AuditedModel, audited: tuple[UpdateLine, ...], storage: str) -> list[Line]:
    """Lines of one storage: the total gradient, with Δ_θ of Z alone beside it."""
    alone = {
        (found.scope, found.logit_scale): found for found in audited if found.storage == storage and found.part == "z"
    }
    lines = []
    for found in audited:
        if found.storage != storage or found.part != "total":
            continue
        own: dict[str, Key] = {"scope": found.scope, "logit_scale": int(found.logit_scale)}
        values = {
            "grad_rel_error": found.grad_rel_error,
            "grad_cosine": found.grad_cosine,
            "adam_dir_rel_error": found.adam_rel_error,
            "z_grad_rel_error": alone[found.scope, found.logit_scale].grad_rel_error,
        }
        key: dict[str, Key] = {"model": model.model, "corpus": model.corpus, **own}
        beside: dict[str, Key] = {"model": model.beside, "corpus": model.beside_corpus, **own}
        lines.append(Line(key, cells_of(values), {}, model.deviations, beside))
    return lines


def _visible(line: Line) -> Tested:
    found = cell(line, "grad_rel_error")
    return found.high >= VISIBLE, f"{line.name()}: {number(found.value)}"


def _adam_larger(line: Line) -> Tested:
    grad, adam = cell(line, "grad_rel_error"), cell(line, "adam_dir_rel_error")
    return adam.high > grad.low, f"{line.name()}: gradient {number(grad.value)}, Adam direction {number(adam.value)}"


CLAIMS = (
    Claim(
        "visible_after_transport",
        "The source error of bf16 logits is still visible in the parameter gradients.",
        all_lines(_visible),
        f"visible: a relative error of {VISIBLE:.1%} at least",
    ),
    Claim(
        "adam_magnifies",
        "The error of the first Adam direction is larger than that of the gradient.",
        all_lines(_adam_larger),
    ),
    Claim(
        "grows_with_scale",
        "The gradient error rises from logit scale 1 to 4.",
        between("logit_scale", 1, 4, rises("grad_rel_error", "gradient error")),
    ),
)

RECIPE = implementation_recipe(
    LABEL,
    "The source error of bf16 logits after transport: gradients and first Adam direction",
    run,
    columns=COLUMNS,
    targets=TARGETS,
    storages=STORAGES,
    logit_scales=SCALES,
    claims=CLAIMS,
    cpu_blocks=CPU_BLOCKS,
    choices=choices(
        "model_ids",
        "corpora",
        "block_size",
        "lambda_value",
        "seed_values",
        num_sequences="the first 8 blocks for both scopes",
        audit_batch_size="all blocks are one batch: gradients are mean-reduced over its predictions",
        adam_betas="any: the first step from zero state with bias correction is g/(|g| + ε)",
        adam_epsilon="1e-8",
    ),
)
