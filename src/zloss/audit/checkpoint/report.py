"""The report of an audit, assembled from its measurements."""

from __future__ import annotations

import torch

from zloss.audit.checkpoint.extremes import extreme_tables
from zloss.audit.checkpoint.measurements import AuditMeasurements
from zloss.audit.checkpoint.spacing import spacing
from zloss.head.native import row_pass_name
from zloss.measure.measurement import Measurement
from zloss.results.audit import AuditReport, CorpusInfo, Heads, ModelInfo, Precision
from zloss.results.figure_data import MAX_SINGULAR_VALUES, Figures, Spectrum
from zloss.results.folder_owner import PLACE_KEY, place_of
from zloss.results.gradient_numbers import GradientInfo, TiedPaths
from zloss.results.named_path import without_folders
from zloss.results.provenance import AuditProvenance, shared_keys

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
