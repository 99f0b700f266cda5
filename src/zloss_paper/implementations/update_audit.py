"""tab:update_audit: does the source error of bf16 logits reach parameter gradients and Adam's first direction?

    zloss reproduce tab:update_audit --profile paper

Expected: total-gradient errors of 3.1 … 4.1 % at the natural scale and 7.9 … 16.4 % at logit × 4, head and whole model;
first Adam directions off by 12.8 … 16.3 % and 18.1 … 25.9 %. Cost: 8 blocks; per block and multiplier one forward pass and
six backward passes, and six gradients of the model in memory.
"""

from __future__ import annotations

from zloss.audit.implementation.storage import Storage
from zloss.audit.implementation.update import UpdateRow
from zloss.report.text.numbers import number
from zloss_paper.engine.claim import Claim, all_rows, cell
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured, Recipe
from zloss_paper.engine.row_claims import between, rises
from zloss_paper.engine.table import Key, Row, Table, measured
from zloss_paper.engine.texts import FINEWEB, WIKITEXT
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.audit_rows import AuditRow, paper_target
from zloss_paper.implementations.shared_audits import ImplementationConfig, audited_models, choices, update_rows

LABEL = "tab:update_audit"
COLUMNS = ("grad_rel_error", "grad_cosine", "adam_dir_rel_error", "z_grad_rel_error")
TARGETS = tuple(paper_target(model, corpus, 8) for model in ("GPT-2", "GPT-2 Medium") for corpus in (WIKITEXT, FINEWEB))
STORAGES: tuple[Storage, ...] = ("bf16", "fp16")
SCALES = (1, 4)
CPU_BLOCKS = 4
VISIBLE = 5e-3


def configure(profile: Profile, overrides: Overrides) -> ImplementationConfig:
    """The models, storage × multiplier."""
    models = audited_models(LABEL, TARGETS, profile, overrides, cpu_blocks=CPU_BLOCKS)
    return ImplementationConfig(models, STORAGES, SCALES)


def run(config: ImplementationConfig, bench: Workbench) -> Measured:
    """Head and whole model by multiplier, bf16; everything else in the JSON file."""
    rows, details = [], []
    for model in config.models.rows:
        audited = update_rows(bench, model.audit, config)
        details += [{"model": model.model, "corpus": model.corpus, "row": row} for row in audited]
        rows += update_lines(model, audited, "bf16")
    return Measured(Table(tuple(rows)), texts=config.models.texts, details={"update_rows": details})


def update_lines(model: AuditRow, audited: tuple[UpdateRow, ...], storage: str) -> list[Row]:
    """Rows of one storage: the total gradient, with Δ_θ of Z alone beside it."""
    alone = {(row.scope, row.logit_scale): row for row in audited if row.storage == storage and row.part == "z"}
    lines = []
    for row in audited:
        if row.storage != storage or row.part != "total":
            continue
        own: dict[str, Key] = {"scope": row.scope, "logit_scale": int(row.logit_scale)}
        values = {
            "grad_rel_error": row.grad_rel_error,
            "grad_cosine": row.grad_cosine,
            "adam_dir_rel_error": row.adam_rel_error,
            "z_grad_rel_error": alone[row.scope, row.logit_scale].grad_rel_error,
        }
        key: dict[str, Key] = {"model": model.model, "corpus": model.corpus, **own}
        beside: dict[str, Key] = {"model": model.beside, "corpus": model.beside_corpus, **own}
        lines.append(Row(key, measured(values), {}, model.deviations, beside))
    return lines


def _visible(row: Row) -> tuple[bool, str]:
    found = cell(row, "grad_rel_error")
    return found.high >= VISIBLE, f"{row.name()}: {number(found.value)}"


def _adam_larger(row: Row) -> tuple[bool, str]:
    grad, adam = cell(row, "grad_rel_error"), cell(row, "adam_dir_rel_error")
    return adam.high > grad.low, f"{row.name()}: gradient {number(grad.value)}, Adam direction {number(adam.value)}"


CLAIMS = (
    Claim(
        "visible_after_transport",
        "The source error of bf16 logits is still visible in the parameter gradients.",
        all_rows(_visible),
        f"visible: a relative error of {VISIBLE:.1%} at least",
    ),
    Claim(
        "adam_magnifies",
        "The error of the first Adam direction is larger than that of the gradient.",
        all_rows(_adam_larger),
    ),
    Claim(
        "grows_with_scale",
        "The gradient error rises from logit scale 1 to 4.",
        between("logit_scale", 1, 4, rises("grad_rel_error", "gradient error")),
    ),
)

RECIPE = Recipe(
    label=LABEL,
    title="The source error of bf16 logits after transport: gradients and first Adam direction",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=paper_table(LABEL, integer_keys=("logit_scale",)),
    claims=CLAIMS,
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
