"""The report of an audit, assembled from its measurements: heads, extreme tokens in context, float spacing, routers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch

from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.router.findings import audit_router
from zloss.console import Clock
from zloss.errors import ZlossError
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
from zloss.transport.backends.native.rows import row_pass_name

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


def audit_report(audit: AuditMeasurements) -> AuditReport:
    """The report without its decisions; every number that does not exist is None with its reason."""
    config, measurement, tails = audit.config, audit.measurement, audit.tails
    heads = Heads(tails.numbers("raw"), tails.numbers("centered"))
    gradient = audit.gradient
    with audit.clock("plane"):
        geometry = tails.sample()
    return AuditReport(
        model=_model_info(audit),
        corpus=CorpusInfo(
            name=audit.corpus.name,
            blocks=audit.blocks.count,
            block_size=audit.blocks.size,
            predictions=tails.count,
            bos=audit.blocks.bos_id is not None,
            extra={"offset": audit.blocks.offset, **audit.corpus.provenance},
        ),
        ppl=tails.perplexity(),
        mu_abs_99=heads.raw.mu_abs_99,
        heads=heads,
        gradient=None if gradient is None else _gradient_info(audit),
        tied_paths=TiedPaths(**gradient.paths) if gradient is not None and gradient.paths else None,
        provenance=_provenance(audit),
        diag_coef=config.diag_coef,
        gain_beta=config.gain_beta,
        target=measurement.target,
        precision=Precision(spacing(heads.raw.row_max_999), spacing(heads.centered.row_max_999)),
        nonfinite=tails.nonfinite(),
        quantile_bounds=tails.bounds(),
        router=audit.router,
        status="complete" if audit.complete else "partial",
        finished_blocks=audit.finished_blocks,
        timings=audit.clock.seconds,
        reasons=_reasons(audit),
        notes=audit.notes,
        figures=Figures(
            histograms=tails.histograms(),
            spectrum=_spectrum(measurement),
            geometry=geometry,
        ),
        extreme_tokens=extreme_tables(tails, audit.blocks, audit.checkpoint.tokenizer),
    )


def _reasons(audit: AuditMeasurements) -> dict[str, str]:
    """Why numbers are None, by dotted path."""
    reasons: dict[str, str] = {}
    if audit.gradient is None:
        left_out = "left out (gradient_blocks = 0)"
        why = INTERRUPTED if audit.gradient_blocks else left_out
        if audit.config.shard:
            why = SHARDED
        reasons |= dict.fromkeys(("gradient", "tied_paths"), why)
    if audit.router is None and (audit.config.shard or not audit.complete):
        # Without a reason, no router section means that the model has no router.
        reasons["router"] = SHARDED if audit.config.shard else INTERRUPTED
    if audit.measurement.lacks_centered is not None:
        reasons |= dict.fromkeys(NEED_MU, audit.measurement.lacks_centered)
    return reasons


def _spectrum(measurement: Measurement) -> Spectrum:
    """The largest singular values in every coordinate that exists."""
    values = {
        coordinate: tuple(measurement.spectrum(coordinate).sigma[:MAX_SINGULAR_VALUES].tolist())
        for coordinate in measurement.coordinates
    }
    return Spectrum(**values, method=measurement.spectrum("raw").method)


def _model_info(audit: AuditMeasurements) -> ModelInfo:
    head, model = audit.measurement.head, audit.checkpoint.model
    return ModelInfo(
        name=without_folders(audit.config.model),
        vocab=head.vocab,
        width=head.width,
        tied=head.tied,
        bias=head.bias_V is not None,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        valid_vocab=audit.measurement.vocab,
        rows_beyond_tokenizer=max(0, head.vocab - len(audit.checkpoint.tokenizer)),
        extra={
            "source": audit.checkpoint.source,
            "class": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": audit.config.dtype,
            PLACE_KEY: place_of(audit.config.model),
            "logit_agreement": audit.agreement,
        },
    )


def _gradient_info(audit: AuditMeasurements) -> GradientInfo:
    found = audit.gradient
    assert found is not None
    return GradientInfo(
        coef=audit.config.diag_coef,
        blocks=audit.gradient_blocks,
        raw=found.raw,
        centered=found.centered,
        whole_model=found.whole_model,
        extra={"norms": found.norms},
    )


def _provenance(audit: AuditMeasurements) -> AuditProvenance:
    return AuditProvenance(
        **shared_keys(audit.command, audit.started, audit.clock.total),
        seed=audit.config.seed,
        extra={"threads": torch.get_num_threads(), "row_pass": row_pass_name()},
    )


@dataclass(frozen=True)
class AuditMeasurements:
    """One audit, complete or interrupted."""

    config: AuditConfig
    checkpoint: Checkpoint
    corpus: Corpus
    blocks: Blocks
    measurement: Measurement
    agreement: float
    """Relative difference between our logits and the model's own."""
    tails: Tails
    finished_blocks: int
    gradient: DiagnosticGradients | None
    router: RouterFindings | None
    """The findings of the routers; None for a dense model."""
    complete: bool
    """False after Ctrl-C."""
    clock: Clock
    started: datetime
    command: str
    notes: tuple[str, ...] = ()
    """Sentences on how the text was cut."""

    @property
    def gradient_blocks(self) -> int:
        """Blocks of the diagnostic batch."""
        return min(self.config.gradient_blocks, self.blocks.count)


CONTEXT_TOKENS = 16
"""Tokens of context shown with an extreme token, its last input included."""


def extreme_tables(tails: Tails, blocks: Blocks, tokenizer: Any) -> tuple[ExtremeTable, ...]:
    """Tables by |log Z − c| and by gain, for each coordinate that exists."""
    return tuple(
        ExtremeTable(quantity, coordinate, _tokens(tails.top(coordinate, quantity), blocks, tokenizer))
        for quantity in EXTREMES
        for coordinate in tails.coordinates
    )


def _tokens(found: list[dict[str, int | float]], blocks: Blocks, tokenizer: Any) -> tuple[ExtremeToken, ...]:
    return tuple(_token(token, blocks, tokenizer) for token in found)


def _token(found: dict[str, int | float], blocks: Blocks, tokenizer: Any) -> ExtremeToken:
    index = int(found["position"])
    block, position = divmod(index, blocks.size)
    # The context does not reach into the block before, which the model does not see.
    start = max(block * blocks.size, index + 1 - CONTEXT_TOKENS)
    return ExtremeToken(
        block=block + blocks.offset,
        position=position,
        target=_text(blocks.stream[index + 1 : index + 2].tolist(), tokenizer),
        context=_text(blocks.stream[start : index + 1].tolist(), tokenizer),
        **{name: _finite(found[name]) for name in TOP_FLOATS},
    )


def _text(ids: list[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


FP16_MAX = 65504.0


def spacing(row_max: float | None) -> Spacing:
    """Distance between neighbouring bf16 and fp16 numbers at `row_max`; None for fp16 where it overflows."""
    if row_max is None or not row_max:
        return Spacing(row_max_999=row_max)
    exponent = math.floor(math.log2(abs(row_max)))
    fp16 = 2.0 ** (max(exponent, -14) - 10) if abs(row_max) <= FP16_MAX else None
    return Spacing(row_max, bf16_spacing=2.0 ** (exponent - 7), fp16_spacing=fp16)


def router_section(checkpoint: Checkpoint, blocks: Blocks, count: int) -> RouterFindings | None:
    """Findings of the routers on the first `count` blocks."""
    try:
        find_routers(checkpoint.model)
    except ZlossError:
        return None
    # One batch, so that α = 1/N_tl counts exactly the decisions that are reported.
    ids = blocks.inputs(0, count)
    batch = {"input_ids": ids}
    if hasattr(checkpoint.model, "router_z_loss_coef"):
        # With labels the model computes its own loss, and what its router Z-loss applies is measured from gradients.
        batch["labels"] = ids
    return audit_router(checkpoint.model, [batch])
