"""One audit: load, check, one pass over the text, gradients on a diagnostic batch, report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

import zloss
from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.extremes import extreme_tables
from zloss.audit.checkpoint.resume import SavedPass
from zloss.audit.checkpoint.router_section import router_section
from zloss.console.interrupt import held_interrupts
from zloss.console.progress import Progress, Silent
from zloss.errors import InputError
from zloss.measure.gradient import GradientFindings, gradient_findings
from zloss.measure.measurement import Measurement, measurement_of
from zloss.measure.tails import Tails
from zloss.measure.token_table import geometry_plane, token_tables
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.output_head import check_head, find_head, hidden_states
from zloss.results.audit import (
    AuditReport,
    CorpusInfo,
    GradientInfo,
    HeadNumbers,
    Heads,
    ModelInfo,
    Precision,
    Provenance,
    Spacing,
    TiedPaths,
)
from zloss.results.figure_data import MAX_SINGULAR_VALUES, Figures, Spectrum
from zloss.results.router import RouterFindings
from zloss.text.blocks import Blocks, make_blocks
from zloss.text.corpus import Corpus, open_corpus
from zloss.transport.spectrum import HeadSpectrum


@dataclass
class _Clock:
    """Seconds by step."""

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - begin

    @property
    def total(self) -> float:
        return time.perf_counter() - self.started


def run_audit(
    config: AuditConfig,
    *,
    folder: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    command: str = "zloss.audit.checkpoint.run.run_audit",
    checkpoint: Checkpoint | None = None,
) -> AuditReport:
    """The report of one audit, without its decisions; Ctrl-C during the pass gives a partial report.

    `folder` is where the state of an unfinished pass is kept; `checkpoint` a model that is already loaded.
    """
    progress = progress or Silent()
    clock, started = _Clock(), datetime.now(UTC)
    if checkpoint is None:
        with clock("load"), progress.step(f"loading {_short(config.model)}", None):
            checkpoint = load_checkpoint(
                config.model,
                dtype=config.dtype,
                trust_remote_code=config.trust_remote_code,
                allow_pickle=config.allow_pickle,
            )
    head = find_head(checkpoint)
    with clock("text"), progress.step("reading text", None):
        corpus = open_corpus(config.texts, config.corpus, config.text_field)
        blocks = make_blocks(
            corpus,
            checkpoint.tokenizer,
            size=config.block_size,
            count=config.blocks,
            bos_id=checkpoint.bos_id(config.bos),
            offset=config.offset,
        )
    with clock("check"), progress.step("checking the head", None):
        agreement = check_head(checkpoint, head, blocks.inputs(0, 1)[0])
    with clock("spectrum"), progress.step("spectrum of the head", None):
        measurement = measurement_of(
            head,
            _wanted_vocab(config.valid_vocab, head.vocab, len(checkpoint.tokenizer)),
            coef=config.diag_coef,
            svd=config.svd,
            seed=config.seed,
        )
    largest = int(blocks.stream.max())
    if largest >= measurement.vocab:
        raise InputError(
            f"--valid-vocab leaves {measurement.vocab} rows of the head, but the text has the token id {largest}: "
            f"give at least {largest + 1}, or 'tokenizer'."
        )

    tails, finished = _pass(config, checkpoint, measurement, blocks, folder, resume, progress, clock)
    complete = finished == blocks.count
    gradient: GradientFindings | None = None
    router: RouterFindings | None = None
    reasons: dict[str, str] = {}
    diagnostic = min(config.gradient_blocks, blocks.count)
    if complete and diagnostic:
        try:
            with clock("gradient"), progress.step("gradients", 5, "passes") as step:
                gradient = gradient_findings(
                    checkpoint,
                    measurement,
                    blocks.inputs(0, diagnostic),
                    blocks.targets(0, diagnostic).reshape(-1),
                    blocks.counted,
                    lambda: step.advance(1),
                )
        except KeyboardInterrupt:
            complete = False
    if complete:
        with clock("router"):
            router = router_section(checkpoint, blocks, max(1, diagnostic))
    if gradient is None:
        why = "left out (gradient_blocks = 0)" if not diagnostic else "the audit was interrupted before it"
        reasons["gradient"] = reasons["tied_paths"] = why
    return _report(
        config, checkpoint, corpus, blocks, measurement, tails, gradient, router, reasons, clock,
        finished=finished, complete=complete, agreement=agreement, started=started, command=command,
    )  # fmt: skip


def _wanted_vocab(asked: int | str | None, rows: int, tokenizer_rows: int) -> int | None:
    """Rows inside log Z as the configuration asks for them; None for all."""
    if asked is None:
        return None
    if asked == "tokenizer":
        return min(tokenizer_rows, rows)
    try:
        return int(asked)
    except ValueError as error:
        raise InputError(f"--valid-vocab is expected to be a number or 'tokenizer', but got {asked!r}.") from error


@torch.no_grad()
def _pass(
    config: AuditConfig,
    checkpoint: Checkpoint,
    measurement: Measurement,
    blocks: Blocks,
    folder: Path | None,
    resume: bool,
    progress: Progress,
    clock: _Clock,
) -> tuple[Tails, int]:
    """(accumulators, finished blocks); fewer blocks than there are after Ctrl-C."""
    saved = SavedPass(folder, config.fingerprint(blocks.fingerprint()))
    earlier = saved.load() if resume else None
    with hidden_states(checkpoint, measurement.head) as hidden_of:

        def batch(start: int, stop: int) -> tuple[Tensor, Tensor]:
            hidden = blocks.counted(hidden_of(blocks.inputs(start, stop)))
            return hidden.reshape(-1, hidden.shape[-1]), blocks.targets(start, stop).reshape(-1)

        with clock("plane"):
            # From the first batch alone, so that a resumed audit draws the same plane.
            plane = geometry_plane(measurement, *batch(0, min(config.batch_blocks, blocks.count)))
        tails = Tails(
            centered=measurement.lacks_centered is None,
            plane=plane is not None,
            beta=config.gain_beta,
            seed=config.seed,
        )
        finished = 0
        if earlier is not None:
            finished, state = earlier
            tails.restore(state)
        with clock("pass"), progress.step("audit", blocks.predictions) as step, held_interrupts() as release:
            step.advance(finished * blocks.size)
            try:
                while finished < blocks.count:
                    start, stop = finished, min(finished + config.batch_blocks, blocks.count)
                    hidden_TD, target_T = batch(start, stop)
                    for table in token_tables(measurement, hidden_TD, target_T, plane):
                        tails.update(table, start * blocks.size + table.tokens.start)
                    finished = stop
                    step.advance((stop - start) * blocks.size)
                    saved.save(finished, tails.state)
                    release()
            except KeyboardInterrupt:
                saved.save(finished, tails.state, now=True)
                return tails, finished
    saved.clear()
    return tails, finished


def _report(
    config: AuditConfig,
    checkpoint: Checkpoint,
    corpus: Corpus,
    blocks: Blocks,
    measurement: Measurement,
    tails: Tails,
    gradient: GradientFindings | None,
    router: RouterFindings | None,
    reasons: dict[str, str],
    clock: _Clock,
    *,
    finished: int,
    complete: bool,
    agreement: float,
    started: datetime,
    command: str,
) -> AuditReport:
    head = measurement.head
    raw = _with_spectrum(tails.numbers("raw", config.diag_coef), measurement.spectra[0])
    centered = HeadNumbers()
    if "centered" in tails.sides:
        centered = _with_spectrum(tails.numbers("centered", config.diag_coef), measurement.spectra[1])
    else:
        why = measurement.lacks_centered or ""
        reasons |= dict.fromkeys(
            ("heads.centered", "gradient.centered", "tied_paths.centered", "precision.centered", "mu_abs_99",
             "heads.raw.mu_abs_99", "heads.raw.mu_rms"), why,
        )  # fmt: skip
    tokenizer_rows = len(checkpoint.tokenizer)
    parameters = sum(p.numel() for p in checkpoint.model.parameters())
    return AuditReport(
        model=ModelInfo(
            name=config.model,
            vocab=head.vocab,
            width=head.width,
            tied=head.tied,
            bias=head.bias_V is not None,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            valid_vocab=measurement.vocab,
            rows_beyond_tokenizer=max(0, head.vocab - tokenizer_rows),
            extra={
                "source": checkpoint.source,
                "class": type(checkpoint.model).__name__,
                "parameters": parameters,
                "dtype": config.dtype,
                "logit_agreement": agreement,
            },
        ),
        corpus=CorpusInfo(
            name=corpus.name,
            blocks=blocks.count,
            block_size=blocks.size,
            predictions=tails.count,
            bos=blocks.bos_id is not None,
            extra={"offset": blocks.offset, **corpus.provenance},
        ),
        ppl=tails.perplexity(),
        mu_abs_99=raw.mu_abs_99,
        heads=Heads(raw, centered),
        gradient=None if gradient is None else _gradient_info(config, blocks, gradient),
        tied_paths=_tied_paths(gradient),
        provenance=Provenance(
            zloss=zloss.__version__,
            torch=torch.__version__,
            transformers=metadata.version("transformers"),
            command=command,
            seed=config.seed,
            started=started.isoformat(timespec="seconds"),
            seconds=clock.total,
            extra={"threads": torch.get_num_threads()},
        ),
        diag_coef=config.diag_coef,
        gain_beta=config.gain_beta,
        target=measurement.target,
        precision=Precision(_spacing(raw.row_max_999), _spacing(centered.row_max_999)),
        nonfinite=tails.nonfinite(),
        quantile_bounds=tails.bounds(),
        router=router,
        status="complete" if complete else "partial",
        finished_blocks=finished,
        timings=clock.seconds,
        reasons=reasons,
        figures=Figures(
            histograms=tails.histograms(),
            spectrum=_spectrum(measurement.spectra, centered="centered" in tails.sides),
            geometry=tails.sample(float(measurement.mean_row_D.norm())),
        ),
        extreme_tokens=extreme_tables(tails, blocks, checkpoint.tokenizer),
    )


def _with_spectrum(numbers: HeadNumbers, spectrum: HeadSpectrum) -> HeadNumbers:
    return replace(numbers, sigma_1=spectrum.sigma_1, e_1=spectrum.share(1), e_16=spectrum.share(16))


def _spectrum(spectra: tuple[HeadSpectrum, HeadSpectrum], *, centered: bool) -> Spectrum:
    raw, other = (tuple(spectrum.sigma[:MAX_SINGULAR_VALUES].tolist()) for spectrum in spectra)
    return Spectrum(raw=raw, centered=other if centered else (), method=spectra[0].method)


def _gradient_info(config: AuditConfig, blocks: Blocks, found: GradientFindings) -> GradientInfo:
    return GradientInfo(
        coef=config.diag_coef,
        blocks=min(config.gradient_blocks, blocks.count),
        raw=found.raw,
        centered=found.centered,
        whole_model=found.whole_model,
        extra={"norms": found.norms},
    )


def _tied_paths(found: GradientFindings | None) -> TiedPaths | None:
    return TiedPaths(**found.paths) if found is not None and found.paths else None


def _spacing(row_max: float | None) -> Spacing:
    """Distance between neighbouring bf16 and fp16 numbers at the row maximum."""
    if row_max is None or not row_max:
        return Spacing(row_max_999=row_max)
    exponent = math.floor(math.log2(abs(row_max)))
    fp16 = 2.0 ** (max(exponent, -14) - 10) if abs(row_max) <= torch.finfo(torch.float16).max else None
    return Spacing(row_max, bf16_spacing=2.0 ** (exponent - 7), fp16_spacing=fp16)


def _short(name: str) -> str:
    return name if len(name) <= 40 else "…" + name[-39:]
