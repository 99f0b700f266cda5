"""The report of an audit, assembled from its measurements: heads, extreme tokens in context, float spacing, routers."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

import torch

from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.router import audit_router
from zloss.console import Clock
from zloss.errors import ZlossError
from zloss.head.native import row_pass_name
from zloss.measure.diagnostic_gradients import DiagnosticGradients
from zloss.measure.measurement import Measurement
from zloss.measure.tail_table import EXTREMES
from zloss.measure.tails import TOP_FLOATS, Tails
from zloss.models.checkpoint import Checkpoint
from zloss.models.routers import find_routers
from zloss.results.audit import AuditReport, CorpusInfo, Heads, ModelInfo, Precision, Spacing
from zloss.results.figure_data import MAX_SINGULAR_VALUES, ExtremeTable, ExtremeToken, Figures, Spectrum
from zloss.results.folder_owner import PLACE_KEY, place_of
from zloss.results.gradient_numbers import GradientInfo, TiedPaths
from zloss.results.named_path import without_folders
from zloss.results.provenance import AuditProvenance, shared_keys
from zloss.results.router import RouterFindings
from zloss.text import Blocks, Corpus

NEED_MU = (
    "heads.centered",
    "gradient.centered",
    "tied_paths.centered",
    "precision.centered",
    "mu_abs_99",
    "heads.raw.mu_abs_99",
    "heads.raw.mu_rms",
)
"""Numbers that do not exist without μ."""
INTERRUPTED = "the audit was interrupted before it"
SHARDED = "left out: the layers of the model were divided over processes (shard)"
CONTEXT_TOKENS = 16
"""Tokens of context shown with an extreme token, including the last input token."""
FP16_MAX = 65504.0


def audit_report(
    config: AuditConfig,
    checkpoint: Checkpoint,
    corpus: Corpus,
    blocks: Blocks,
    measurement: Measurement,
    tails: Tails,
    *,
    agreement: float,
    finished_blocks: int,
    gradient: DiagnosticGradients | None,
    gradient_blocks: int,
    router: RouterFindings | None,
    complete: bool,
    clock: Clock,
    started: datetime,
    command: str,
    notes: tuple[str, ...],
) -> AuditReport:
    """The report without its decisions; every number that does not exist is None with its reason.

    `agreement`: the relative difference between our logits and the model's own. `complete` is False after Ctrl-C.
    `router` is None for a dense model. `notes`: how the text was cut.
    """
    heads = Heads(tails.numbers("raw"), tails.numbers("centered"))
    with clock("plane"):
        geometry = tails.sample()
    singular_values = {
        coordinate: tuple(measurement.spectrum(coordinate).sigma[:MAX_SINGULAR_VALUES].tolist())
        for coordinate in measurement.coordinates
    }
    gradient_info, tied_paths = None, None
    if gradient is not None:
        gradient_info = GradientInfo(
            coef=config.diag_coef,
            blocks=gradient_blocks,
            raw=gradient.raw,
            centered=gradient.centered,
            whole_model=gradient.whole_model,
            extra={"norms": gradient.norms},
        )
        tied_paths = TiedPaths(**gradient.paths) if gradient.paths else None
    return AuditReport(
        model=_model_info(config, checkpoint, measurement, agreement),
        corpus=CorpusInfo(
            name=corpus.name,
            blocks=blocks.count,
            block_size=blocks.size,
            predictions=tails.count,
            bos=blocks.bos_id is not None,
            extra={"offset": blocks.offset, **corpus.provenance},
        ),
        ppl=tails.perplexity(),
        mu_abs_99=heads.raw.mu_abs_99,
        heads=heads,
        gradient=gradient_info,
        tied_paths=tied_paths,
        provenance=AuditProvenance(
            **shared_keys(command, started, clock.total),
            seed=config.seed,
            extra={"threads": torch.get_num_threads(), "row_pass": row_pass_name()},
        ),
        diag_coef=config.diag_coef,
        gain_beta=config.gain_beta,
        target=measurement.target,
        precision=Precision(_spacing(heads.raw.row_max_999), _spacing(heads.centered.row_max_999)),
        nonfinite=tails.nonfinite(),
        quantile_bounds=tails.bounds(),
        router=router,
        status="complete" if complete else "partial",
        finished_blocks=finished_blocks,
        timings=clock.seconds,
        reasons=_reasons(config, measurement, gradient, gradient_blocks, router, complete),
        notes=notes,
        figures=Figures(
            histograms=tails.histograms(),
            spectrum=Spectrum(**singular_values, method=measurement.spectrum("raw").method),
            geometry=geometry,
        ),
        extreme_tokens=tuple(
            ExtremeTable(quantity, coordinate, _extreme_tokens(tails.top(coordinate, quantity), blocks, checkpoint))
            for quantity in EXTREMES
            for coordinate in tails.coordinates
        ),
    )


def _model_info(config: AuditConfig, checkpoint: Checkpoint, measurement: Measurement, agreement: float) -> ModelInfo:
    head, model = measurement.head, checkpoint.model
    return ModelInfo(
        name=without_folders(config.model),
        vocab=head.vocab,
        width=head.width,
        tied=head.tied,
        bias=head.bias_V is not None,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        valid_vocab=measurement.vocab,
        rows_beyond_tokenizer=max(0, head.vocab - len(checkpoint.tokenizer)),
        extra={
            "source": checkpoint.source,
            "class": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": config.dtype,
            PLACE_KEY: place_of(config.model),
            "logit_agreement": agreement,
        },
    )


def _spacing(row_max: float | None) -> Spacing:
    """Distance between adjacent bf16 and fp16 numbers at `row_max`; None for fp16 where it overflows."""
    if row_max is None or not row_max:
        return Spacing(row_max_999=row_max)
    exponent = math.floor(math.log2(abs(row_max)))
    fp16 = 2.0 ** (max(exponent, -14) - 10) if abs(row_max) <= FP16_MAX else None
    return Spacing(row_max, bf16_spacing=2.0 ** (exponent - 7), fp16_spacing=fp16)


def _reasons(
    config: AuditConfig,
    measurement: Measurement,
    gradient: DiagnosticGradients | None,
    gradient_blocks: int,
    router: RouterFindings | None,
    complete: bool,
) -> dict[str, str]:
    """Why numbers are None, by dotted path."""
    reasons: dict[str, str] = {}
    if gradient is None:
        why = INTERRUPTED if gradient_blocks else "left out (gradient_blocks = 0)"
        reasons |= dict.fromkeys(("gradient", "tied_paths"), SHARDED if config.shard else why)
    if router is None and (config.shard or not complete):
        # Without a reason, a missing router section means that the model has no router.
        reasons["router"] = SHARDED if config.shard else INTERRUPTED
    if measurement.lacks_centered is not None:
        reasons |= dict.fromkeys(NEED_MU, measurement.lacks_centered)
    return reasons


def _extreme_tokens(
    found: list[dict[str, int | float]], blocks: Blocks, checkpoint: Checkpoint
) -> tuple[ExtremeToken, ...]:
    """Tokens with their context, as text."""

    def text(ids: Any) -> str:
        return str(checkpoint.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    tokens = []
    for token in found:
        index = int(token["position"])
        block, position = divmod(index, blocks.size)
        # The context stays inside the block: the model does not see the one before it.
        start = max(block * blocks.size, index + 1 - CONTEXT_TOKENS)
        numbers = {name: float(token[name]) if math.isfinite(token[name]) else None for name in TOP_FLOATS}
        tokens.append(
            ExtremeToken(
                block=block + blocks.offset,
                position=position,
                target=text(blocks.stream[index + 1 : index + 2]),
                context=text(blocks.stream[start : index + 1]),
                **numbers,
            )
        )
    return tuple(tokens)


def router_section(checkpoint: Checkpoint, blocks: Blocks, count: int) -> RouterFindings | None:
    """Findings on the routers from the first `count` blocks; None for a model without routers."""
    try:
        find_routers(checkpoint.model)
    except ZlossError:
        return None
    # One batch, so that α = 1/N_tl counts exactly the decisions that are reported.
    ids = blocks.inputs(0, count)
    batch = {"input_ids": ids}
    if hasattr(checkpoint.model, "router_z_loss_coef"):
        # With labels the model computes its own loss, and the router Z-loss it applies is measured from gradients.
        batch["labels"] = ids
    return audit_router(checkpoint.model, [batch])
