"""tab:source_audit: the Z source rebuilt from stored logits, against the truth before storage.

    zloss reproduce tab:source_audit --profile paper

Expected (GPT-2, WikiText-103): bf16 forward error 1.9e-4 … 2.7e-4 while Δ_src is 0.065, 0.122, 0.183 at logit × 1, 2, 4;
fp16 an eighth of that. Cost: 8 blocks, one forward pass and some fp64 products.

Δ_src is the mean over tokens of ‖δ̂ − δ‖₂/‖δ‖₂, with its p99 and maximum beside it; the forward error that of the scalar of
a block, mean over blocks; the reference fp64 on fp32 parameters. The rows "bf16 inputs" store no logits: hidden states
and head are bf16 and our chunked backend projects them itself, against fp64 of the same bf16 numbers.
"""

from __future__ import annotations

from zloss.audit.implementation.implementations import find_implementation
from zloss.audit.implementation.linear_kernels import linear_row
from zloss.audit.implementation.source import SourceRow
from zloss.audit.implementation.storage import Storage
from zloss.errors import CoordinateError
from zloss.report.text.numbers import number
from zloss_paper.engine.claim import Claim, Finding, all_rows, cell
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Measured, Recipe
from zloss_paper.engine.row_claims import between, rises, times_smaller
from zloss_paper.engine.table import Key, Row, Table, measured
from zloss_paper.engine.texts import WIKITEXT
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.audit_rows import AuditRow, paper_target
from zloss_paper.implementations.shared_audits import (
    ImplementationConfig,
    audited_models,
    choices,
    head_tokens,
    line_keys,
    source_rows,
)

LABEL = "tab:source_audit"
COLUMNS = ("rel_forward_error", "delta_src", "delta_src_p99", "delta_src_max", "backward_cosine", "split_residual")
TARGETS = (paper_target("GPT-2", WIKITEXT, 8),)
STORAGES: tuple[Storage, ...] = ("fp32", "bf16", "fp16")
SCALES = (1, 2, 4)
OWN_INPUTS, OWN_TOKENS = "bf16 inputs, ours", 32
UNDERSTATES = 10
SMALLER = 4
FORWARD = 5e-4


def configure(profile: Profile, overrides: Overrides) -> ImplementationConfig:
    """The model, and storage × multiplier."""
    return ImplementationConfig(audited_models(LABEL, TARGETS, profile, overrides), STORAGES, SCALES)


def run(config: ImplementationConfig, bench: Workbench) -> Measured:
    """Nine rows per model, and three without stored logits."""
    rows, details, notes = [], [], []
    for model in config.models.rows:
        audited = source_rows(bench, model.audit, config)
        rows += [source_line(model, row) for row in audited]
        details += [{"model": model.model, "corpus": model.corpus, "row": row} for row in audited]
        try:
            rows += _own_inputs(config, bench, model)
            notes.append(f"{model.model}: the rows {OWN_INPUTS!r} rest on {OWN_TOKENS} tokens of each block")
        except CoordinateError as error:
            notes.append(f"{model.model}: {error}")
    return Measured(Table(tuple(rows)), tuple(notes), config.models.texts, {"source_rows": details})


def source_line(model: AuditRow, row: SourceRow, *, corpus: bool = False) -> Row:
    """One storage and multiplier as a row of the table."""
    key, beside = line_keys(model, {"storage": row.storage, "logit_scale": int(row.logit_scale)}, corpus=corpus)
    values = {
        "rel_forward_error": row.forward_scalar,
        "delta_src": row.delta_src.mean,
        "delta_src_p99": row.delta_src.p99,
        "delta_src_max": row.delta_src.maximum,
        "backward_cosine": row.cosine,
        "split_residual": row.residual,
    }
    return Row(key, measured(values), {}, model.deviations, beside)


def _own_inputs(config: ImplementationConfig, bench: Workbench, model: AuditRow) -> list[Row]:
    tokens = head_tokens(bench, model.audit)
    thin = tokens.thinned(OWN_TOKENS)
    lines = []
    for scale in config.logit_scales:
        row = linear_row(
            find_implementation("chunked-linear"),
            tokens.head,
            thin.hidden_TD,
            thin.label_T,
            inputs="bf16",
            logit_scale=scale,
            coef=config.coef,
            target=tokens.target,
        )
        tail = row.delta_src
        assert tail is not None
        key: dict[str, Key] = {"model": model.model, "storage": OWN_INPUTS, "logit_scale": int(scale)}
        values = {
            "rel_forward_error": row.forward,
            "delta_src": tail.mean,
            "delta_src_p99": tail.p99,
            "delta_src_max": tail.maximum,
            "backward_cosine": row.source_cosine,
        }
        reasons = {"split_residual": "no logits are stored, so there is nothing to split"}
        lines.append(Row(key, measured(values), reasons, model.deviations))
    return lines


def understates(row: Row) -> tuple[bool, str]:
    """Δ_src is far above the forward error."""
    forward, source = cell(row, "rel_forward_error"), cell(row, "delta_src")
    ok = source.high >= UNDERSTATES * forward.low
    return ok, f"{row.name()}: forward {number(forward.value, 2)}, Δ_src {number(source.value)}"


def forward_below(row: Row) -> tuple[bool, str]:
    """The forward error looks harmless."""
    found = cell(row, "rel_forward_error")
    return found.low < FORWARD, f"{row.name()}: {number(found.value, 2)}"


def rises_with_scale(table: Table) -> Finding:
    """Whether Δ_src of bf16 storage is larger at logit scale 4 than at 1."""
    return between("logit_scale", 1, 4, rises("delta_src", "Δ_src"))(Table(table.find(storage="bf16")))


CLAIMS = (
    Claim(
        "forward_understates",
        "Agreement of the forward scalar understates the error of the Z source, for bf16 and fp16 logits.",
        lambda table: all_rows(understates)(stored(table)),
        f"substantially: Δ_src at least {UNDERSTATES} times the forward error",
    ),
    Claim(
        "forward_below",
        "With bf16 logits the forward error stays below 5e-4 at every logit scale.",
        all_rows(forward_below, storage="bf16"),
    ),
    Claim(
        "grows_with_scale",
        "With bf16 logits the source error rises from logit scale 1 to 4.",
        rises_with_scale,
    ),
    Claim(
        "fp16_smaller",
        "fp16 logits give a much smaller source error than bf16 logits.",
        between("storage", "bf16", "fp16", times_smaller("delta_src", "Δ_src", SMALLER)),
        f"much: by a factor of {SMALLER}",
    ),
)


def stored(table: Table) -> Table:
    """Rows of 16-bit logits."""
    return Table(tuple(row for row in table if row.key["storage"] in ("bf16", "fp16")))


RECIPE = Recipe(
    label=LABEL,
    title="The Z source rebuilt from stored logits",
    columns=COLUMNS,
    configure=configure,
    run=run,
    paper=paper_table(LABEL, integer_keys=("logit_scale",)),
    claims=CLAIMS,
    choices=choices(
        "model_ids",
        "corpus_variant",
        "block_size",
        "lambda_value",
        "seed_values",
        num_sequences="the first 8 blocks",
        audit_batch_size="one block: the forward error is that of a block's scalar",
        accumulation_precision="fp32 statistics of the stored logits; the reference is fp64",
    ),
)
