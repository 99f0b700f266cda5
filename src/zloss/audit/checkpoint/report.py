"""The report of an audit, assembled from its measurements: heads, extreme tokens in context, float spacing, routers."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime
from typing import Any

import torch

from zloss.audit.config import AuditConfig
from zloss.audit.router import COEF_ATTRIBUTE, audit_router, router_gradient_share
from zloss.console import Clock
from zloss.errors import ZlossError
from zloss.measure.measurement import Measurement
from zloss.measure.tokens import (
    EXTREMES,
    Columns,
    TokenSample,
    extreme_rows,
    geometry_sample,
    head_numbers,
    histograms,
    nonfinite_tokens,
    perplexity,
    quantile,
    quantity,
)
from zloss.models.checkpoint import DTYPES, Checkpoint, decoded, is_offloaded, tokenizer_size
from zloss.models.output_head import OutputHead
from zloss.models.routers import find_routers
from zloss.results.audit import (
    MAX_SINGULAR_VALUES,
    NO_INPUT_PATH,
    AuditReport,
    CorpusInfo,
    ExtremeTable,
    ExtremeToken,
    Figures,
    GradientInfo,
    Heads,
    LogitNoise,
    ModelInfo,
    PathNumbers,
    PlannedLoss,
    Precision,
    Quantity,
    Spacing,
    Spectrum,
    TiedPaths,
)
from zloss.results.folder import PLACE_KEY, place_of
from zloss.results.options import Coordinate
from zloss.results.provenance import AuditProvenance, shared_keys, without_folders
from zloss.results.router import RouterFindings
from zloss.text import Blocks, Corpus

NEED_MU = (
    "logit_noise.bf16.centered",
    "logit_noise.fp16.centered",
    "heads.centered",
    "gradient.centered",
    "tied_paths.centered",
    "precision.centered",
    "mu_abs_99",
    "heads.raw.mu_abs_99",
    "heads.raw.mu_rms",
)
"""Numbers that do not exist without μ."""
NEED_ROUTER_COEF = ("planned.router_coef", "planned.router_convention", "planned.router_share")
INTERRUPTED = "the audit was interrupted before it"
OFFLOADED = "skipped: some of the weights are offloaded (device_map)"
EXTREME_TOKENS = 20
"""Rows of a table of extreme tokens."""
SHOWN = ("log_z", "log_z_centered", "mu", "gain", "gain_centered", "ce")
"""What these tables show for each token."""
CONTEXT_TOKENS = 16
"""Tokens of context shown with an extreme token, including the last input token."""
FP16_MAX = 65504.0


def audit_report(
    config: AuditConfig,
    checkpoint: Checkpoint,
    corpus: Corpus,
    blocks: Blocks,
    measurement: Measurement,
    columns: Columns,
    sample: TokenSample,
    *,
    agreement: float | None,
    finished_blocks: int,
    gradient: tuple[GradientInfo, dict[str, PathNumbers], dict[str, float | None]] | None,
    gradient_blocks: int,
    noise: LogitNoise | None,
    router: tuple[RouterFindings, float | None] | None,
    complete: bool,
    clock: Clock,
    started: datetime,
    command: str,
    notes: tuple[str, ...],
) -> AuditReport:
    """The report without its decisions, from the columns of all tokens; every number that does not exist is None with its reason.

    `sample` holds the tokens that the geometry figure draws.
    `agreement`: the relative difference between our logits and the model's own, None if the model returns no logits to
    compare with. `complete` is False after Ctrl-C. `router` is what `router_section` found. `notes`: how the text was
    cut.
    """
    with clock("numbers"):
        heads = Heads(head_numbers(columns, measurement, "raw"), head_numbers(columns, measurement, "centered"))
    with clock("plane"):
        geometry = geometry_sample(columns, measurement, blocks, sample)
    singular_values = {
        coordinate: tuple(measurement.spectrum(coordinate).sigma[:MAX_SINGULAR_VALUES].tolist())
        for coordinate in measurement.coordinates
    }
    info, paths, shares = (None, {}, {}) if gradient is None else gradient
    found_router, router_share = (None, None) if router is None else router
    planned = _planned_loss(config, measurement, columns, shares, blocks.size * gradient_blocks, router_share)
    return AuditReport(
        model=replace(
            model_info(
                config.model,
                checkpoint,
                measurement.head,
                dtype=_dtype_name(measurement.head.weight_VD.dtype),
                logit_agreement=agreement,
            ),
            valid_vocab=measurement.vocab,
            rows_beyond_tokenizer=None
            if (known := tokenizer_size(checkpoint.tokenizer)) is None
            else max(0, measurement.head.vocab - known),
        ),
        corpus=replace(corpus_info(corpus, blocks, offset=blocks.offset), predictions=len(columns["ce"])),
        ppl=perplexity(columns),
        mu_abs_99=heads.raw.mu_abs_99,
        heads=heads,
        gradient=info,
        tied_paths=TiedPaths(**paths) if paths else None,
        provenance=AuditProvenance(
            **shared_keys(command, started, clock.total),
            seed=config.seed,
            extra={"threads": torch.get_num_threads(), "row_pass": "torch"},
        ),
        diag_coef=config.diag_coef,
        gain_beta=config.gain_beta,
        target=measurement.target,
        precision=Precision(_spacing(heads.raw.row_max_999), _spacing(heads.centered.row_max_999)),
        logit_noise=noise,
        planned=planned,
        nonfinite=nonfinite_tokens(columns),
        router=found_router,
        status="complete" if complete else "partial",
        finished_blocks=finished_blocks,
        timings=clock.seconds,
        reasons=_reasons(checkpoint, measurement, info, gradient_blocks, found_router, planned, complete),
        notes=notes,
        figures=Figures(
            histograms=histograms(columns, measurement),
            spectrum=Spectrum(**singular_values, method=measurement.spectrum("raw").method),
            geometry=geometry,
        ),
        extreme_tokens=tuple(
            ExtremeTable(name, coordinate, _extreme_tokens(columns, name, coordinate, measurement, blocks, checkpoint))
            for name in EXTREMES
            for coordinate in measurement.coordinates
        ),
    )


def _planned_loss(
    config: AuditConfig,
    measurement: Measurement,
    columns: Columns,
    shares: dict[str, float | None],
    tokens: int,
    router_share: float | None,
) -> PlannedLoss:
    """What the configured Z-loss would send through the model; `shares` were measured at λ_diag, on `tokens` predictions."""
    target = measurement.target if config.target is None else config.target
    delta_z_T = quantity(columns, "delta_z", "raw", replace(measurement, coef=config.coef, target=target))
    assert delta_z_T is not None
    scale = config.coef / measurement.coef
    return PlannedLoss(
        coef=config.coef,
        target=target,
        logits=config.logits,
        delta_u_99=quantile(delta_z_T * columns["gain"], 0.99),
        delta_u_ce_99=quantile(columns["delta_u_ce"], 0.99),
        **{name: None if share is None else scale * share for name, share in shares.items()},
        tokens=tokens if shares else None,
        router_coef=config.router_coef,
        router_convention=None if config.router_coef is None else config.router_convention,
        router_share=router_share,
    )


def model_info(model: str, checkpoint: Checkpoint, head: OutputHead, **extra: Any) -> ModelInfo:
    """The checkpoint and its head; `extra` sets additional fields."""
    return ModelInfo(
        name=without_folders(model),
        vocab=head.vocab,
        width=head.width,
        tied=head.tied,
        bias=head.bias_V is not None,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        extra={
            "source": checkpoint.source,
            "class": type(checkpoint.model).__name__,
            "parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
            PLACE_KEY: place_of(model),
            **extra,
        },
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return next((name for name, each in DTYPES.items() if each == dtype), str(dtype).removeprefix("torch."))


def corpus_info(corpus: Corpus, blocks: Blocks, **extra: Any) -> CorpusInfo:
    """The text, as if all of it had been scored; `extra` are further facts."""
    return CorpusInfo(
        name=corpus.name,
        blocks=blocks.count,
        block_size=blocks.size,
        predictions=blocks.predictions,
        bos=blocks.bos_id is not None,
        extra={**extra, **corpus.provenance},
    )


def _spacing(row_max: float | None) -> Spacing:
    """Distance between adjacent bf16 and fp16 numbers at `row_max`; None for fp16 where it overflows."""
    if row_max is None or not row_max:
        return Spacing(row_max_999=row_max)
    exponent = math.floor(math.log2(abs(row_max)))
    fp16 = 2.0 ** (max(exponent, -14) - 10) if abs(row_max) <= FP16_MAX else None
    return Spacing(row_max, bf16_spacing=2.0 ** (exponent - 7), fp16_spacing=fp16)


def _reasons(
    checkpoint: Checkpoint,
    measurement: Measurement,
    gradient: GradientInfo | None,
    gradient_blocks: int,
    router: RouterFindings | None,
    planned: PlannedLoss,
    complete: bool,
) -> dict[str, str]:
    """Why numbers are None, by dotted path."""
    reasons: dict[str, str] = {}
    offloaded = is_offloaded(checkpoint.model)
    if gradient is None:
        why = INTERRUPTED if gradient_blocks else "skipped (gradient_blocks = 0)"
        shares = ("planned.r_z", "planned.r_z_model", "planned.input_path", "planned.tokens")
        reasons |= dict.fromkeys(("gradient", "tied_paths", *shares), OFFLOADED if offloaded else why)
    if router is None and (offloaded or not complete):
        # Without a reason, a missing router section means that the model has no router.
        reasons["router"] = OFFLOADED if offloaded else INTERRUPTED
    elif checkpoint.custom is not None:
        reasons["router"] = "skipped: routers are only found in transformers models"
    if not measurement.head.tied:
        reasons["planned.input_path"] = NO_INPUT_PATH
    if planned.router_coef is None:
        reasons |= dict.fromkeys(NEED_ROUTER_COEF, "no `router_coef` was given")
    elif planned.router_share is None:
        reasons["planned.router_share"] = "the model has no router with a softmax, or its gradient was not measured"
    if not complete:
        reasons["logit_noise"] = INTERRUPTED
    if measurement.lacks_centered is not None:
        reasons |= dict.fromkeys(NEED_MU, measurement.lacks_centered)
    return reasons


def _extreme_tokens(
    columns: Columns,
    name: Quantity,
    coordinate: Coordinate,
    measurement: Measurement,
    blocks: Blocks,
    checkpoint: Checkpoint,
) -> tuple[ExtremeToken, ...]:
    """The tokens with the largest values of a quantity in their context, as text; as ids without a tokenizer."""

    def text(ids: Any) -> str:
        if checkpoint.tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        return decoded(checkpoint.tokenizer, ids.tolist())

    scores = quantity(columns, name, coordinate, measurement)
    assert scores is not None
    rows = extreme_rows(scores, EXTREME_TOKENS)
    shown = {
        column: columns[column][rows].tolist() if column in columns else [math.nan] * len(rows) for column in SHOWN
    }
    tokens = []
    for place, (block, position) in enumerate(zip(columns["block"][rows], columns["position"][rows], strict=True)):
        first = int(block) - blocks.offset
        inputs_BN, targets_BN = blocks.batch(slice(first, first + 1))
        numbers = {column: value[place] if math.isfinite(value[place]) else None for column, value in shown.items()}
        tokens.append(
            ExtremeToken(
                block=int(block),
                position=int(position),
                target=text(targets_BN[0, position : position + 1]),
                # The context stays inside the block: the model does not see the one before it.
                context=text(blocks.counted(inputs_BN)[0, : position + 1][-CONTEXT_TOKENS:]),
                **numbers,
            )
        )
    return tuple(tokens)


def router_section(
    config: AuditConfig, checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks, count: int
) -> tuple[RouterFindings, float | None] | None:
    """(findings on the routers from the first `count` blocks, share of the router Z-loss in the gradient of the router weights,
    None without λ_R); None for a model without routers, or outside transformers."""
    if checkpoint.custom is not None:
        return None
    try:
        routers = find_routers(checkpoint.model)
    except ZlossError:
        return None
    # One batch, so that α = 1/N_tl counts exactly the decisions that are reported.
    ids = blocks.inputs(0, count).to(next(checkpoint.model.parameters()).device)
    batch = {"input_ids": ids}
    if hasattr(checkpoint.model, COEF_ATTRIBUTE):
        # With labels the model computes its own loss, and the router Z-loss it applies is measured from gradients.
        batch["labels"] = ids
    findings = audit_router(checkpoint.model, [batch])
    if config.router_coef is None or findings.log_z is None:
        return findings, None
    return findings, router_gradient_share(
        checkpoint, measurement, routers, blocks, coef=config.router_coef, convention=config.router_convention
    )
