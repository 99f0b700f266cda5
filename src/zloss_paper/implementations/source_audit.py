"""tab:source_audit: the Z source rebuilt from stored logits, against the truth before storage.

    zloss reproduce tab:source_audit --profile paper

Expected (GPT-2, WikiText-103): bf16 forward error 1.9e-4 … 2.7e-4 while Δ_src is 0.065, 0.122, 0.183 at logit × 1, 2, 4;
fp16 an eighth of that. Cost: 8 blocks, one forward pass and some fp64 products.

Δ_src is the mean over tokens of ‖δ̂ − δ‖₂/‖δ‖₂, with its p99 and maximum beside it. The forward error is that of the scalar
of a block, mean over blocks. The reference is fp64 on fp32 parameters. The lines "bf16 inputs" store no logits: hidden states
and head are bf16 and our chunked backend projects them itself, against fp64 of the same bf16 numbers.
"""

from __future__ import annotations

from zloss.audit.implementation.implementations import find_implementation
from zloss.audit.implementation.kernels import linear_line
from zloss.audit.implementation.source import SourceLine, Storage
from zloss.errors import CoordinateError
from zloss.report.text.numbers import number
from zloss_paper.engine.audited_models import AuditedModel, paper_target
from zloss_paper.engine.checks import Tested, all_lines, between, rises, times_smaller
from zloss_paper.engine.claim import Claim, Judgement
from zloss_paper.engine.comparison import cell
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Key, Line, Table, cells_of
from zloss_paper.engine.texts import WIKITEXT
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations.head_tokens import head_tokens
from zloss_paper.implementations.lines import audit_details, line_keys
from zloss_paper.implementations.recipe import implementation_recipe
from zloss_paper.implementations.setting import ImplementationConfig, choices
from zloss_paper.implementations.shared_audits import shared_source_audit

LABEL = "tab:source_audit"
COLUMNS = ("rel_forward_error", "delta_src", "delta_src_p99", "delta_src_max", "backward_cosine", "split_residual")
TARGETS = (paper_target("GPT-2", WIKITEXT, 8),)
STORAGES: tuple[Storage, ...] = ("fp32", "bf16", "fp16")
SCALES = (1, 2, 4)
OWN_INPUTS, OWN_TOKENS = "bf16 inputs, ours", 32
UNDERSTATES = 10
SMALLER = 4
FORWARD = 5e-4


def run(config: ImplementationConfig, bench: Workbench) -> RecipeResult:
    """Nine lines per model, and three without stored logits."""
    lines, details, notes = [], [], []
    for model in config.models.rows:
        audited = shared_source_audit(bench, model.audit, config)
        lines += [source_line(model, found) for found in audited]
        details += audit_details(model, audited)
        try:
            lines += _own_inputs(config, bench, model)
            notes.append(f"{model.model}: the lines {OWN_INPUTS!r} rest on {OWN_TOKENS} tokens of each block")
        except CoordinateError as error:
            notes.append(f"{model.model}: {error}")
    return RecipeResult(Table(tuple(lines)), tuple(notes), config.models.texts, {"source_rows": details})


def stored_16_bit(config: ImplementationConfig, bench: Workbench, *, corpus: bool) -> RecipeResult:
    """Lines of 16-bit storage alone; `corpus` puts the corpus into their key."""
    audited = [(model, one) for model in config.models.rows for one in shared_source_audit(bench, model.audit, config)]
    lines = tuple(source_line(model, one, corpus=corpus) for model, one in audited if one.storage != "fp32")
    return RecipeResult(Table(lines), texts=config.models.texts)


def source_line(model: AuditedModel, found: SourceLine, *, corpus: bool = False) -> Line:
    """One storage and multiplier as a line of the table."""
    key, beside = line_keys(model, {"storage": found.storage, "logit_scale": int(found.logit_scale)}, corpus=corpus)
    values = {
        "rel_forward_error": found.forward_scalar,
        "delta_src": found.delta_src.mean,
        "delta_src_p99": found.delta_src.p99,
        "delta_src_max": found.delta_src.maximum,
        "backward_cosine": found.cosine,
        "split_residual": found.residual,
    }
    return Line(key, cells_of(values), {}, model.deviations, beside)


def _own_inputs(config: ImplementationConfig, bench: Workbench, model: AuditedModel) -> list[Line]:
    tokens = head_tokens(bench, model.audit)
    thin = tokens.thinned(OWN_TOKENS)
    lines = []
    for scale in config.logit_scales:
        found = linear_line(
            find_implementation("chunked-linear"),
            tokens.head,
            thin.hidden_TD,
            thin.label_T,
            inputs="bf16",
            logit_scale=scale,
            coef=config.coef,
            target=tokens.target,
        )
        tail = found.delta_src
        assert tail is not None
        key: dict[str, Key] = {"model": model.model, "storage": OWN_INPUTS, "logit_scale": int(scale)}
        values = {
            "rel_forward_error": found.forward,
            "delta_src": tail.mean,
            "delta_src_p99": tail.p99,
            "delta_src_max": tail.maximum,
            "backward_cosine": found.source_cosine,
        }
        reasons = {"split_residual": "no logits are stored, so there is nothing to split"}
        lines.append(Line(key, cells_of(values), reasons, model.deviations))
    return lines


def understates(line: Line) -> Tested:
    """Δ_src is far above the forward error."""
    forward, source = cell(line, "rel_forward_error"), cell(line, "delta_src")
    ok = source.high >= UNDERSTATES * forward.low
    return ok, f"{line.name()}: forward {number(forward.value, 2)}, Δ_src {number(source.value)}"


def forward_below(line: Line) -> Tested:
    """The forward error is below the bound the paper gives."""
    found = cell(line, "rel_forward_error")
    return found.low < FORWARD, f"{line.name()}: {number(found.value, 2)}"


def rises_with_scale(table: Table) -> Judgement:
    """Whether Δ_src of bf16 storage is larger at logit scale 4 than at 1."""
    return between("logit_scale", 1, 4, rises("delta_src", "Δ_src"))(Table(table.find(storage="bf16")))


CLAIMS = (
    Claim(
        "forward_understates",
        "Agreement of the forward scalar understates the error of the Z source, for bf16 and fp16 logits.",
        lambda table: all_lines(understates)(stored(table)),
        f"substantially: Δ_src at least {UNDERSTATES} times the forward error",
    ),
    Claim(
        "forward_below",
        "With bf16 logits the forward error stays below 5e-4 at every logit scale.",
        all_lines(forward_below, storage="bf16"),
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
    """Lines of 16-bit logits."""
    return Table(tuple(line for line in table if line.key["storage"] in ("bf16", "fp16")))


RECIPE = implementation_recipe(
    LABEL,
    "The Z source rebuilt from stored logits",
    run,
    columns=COLUMNS,
    targets=TARGETS,
    storages=STORAGES,
    logit_scales=SCALES,
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
