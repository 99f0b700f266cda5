"""One audit: load, check, one pass over the text, gradients on a diagnostic batch, report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from zloss.audit.checkpoint.clock import Clock
from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.measurements import AuditMeasurements
from zloss.audit.checkpoint.report import audit_report
from zloss.audit.checkpoint.router_section import router_section
from zloss.audit.checkpoint.text_pass import text_pass
from zloss.console.progress import Progress, Silent
from zloss.errors import InputError
from zloss.measure.block_values import BlockValues
from zloss.measure.diagnostic_batch import DiagnosticBatch
from zloss.measure.diagnostic_gradients import DiagnosticGradients, diagnostic_gradients
from zloss.measure.graph_room import GraphRoom
from zloss.measure.measurement import Measurement, measurement_of, resolve_vocab
from zloss.measure.model_blocks import ModelBlocks, model_blocks
from zloss.measure.sharded_layers import shard_layers_
from zloss.measure.token_pass import KeptForwards
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.head_check import check_head
from zloss.models.output_head import find_head
from zloss.ranks.job import Job
from zloss.results.audit import AuditReport
from zloss.results.router import RouterFindings
from zloss.text.blocks import Blocks
from zloss.text.corpus import Corpus, open_corpus


def run_audit(
    config: AuditConfig,
    *,
    folder: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    command: str = "zloss.audit.checkpoint.run.run_audit",
    checkpoint: Checkpoint | None = None,
    by_block: BlockValues | None = None,
) -> AuditReport:
    """The report of one audit, without its decisions; Ctrl-C during the pass gives a partial report.

    `folder` is where the state of an unfinished pass is kept; `checkpoint` is a model that is already loaded;
    `by_block` takes the tokens of the pass block by block, and such an audit cannot be resumed.
    """
    report = run_audit_of(
        Job(),
        config,
        folder=folder,
        resume=resume,
        progress=progress,
        command=command,
        checkpoint=checkpoint,
        by_block=by_block,
    )
    assert report is not None
    return report


def run_audit_of(
    job: Job,
    config: AuditConfig,
    *,
    folder: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    command: str = "zloss.audit.checkpoint.run.run_audit",
    checkpoint: Checkpoint | None = None,
    by_block: BlockValues | None = None,
) -> AuditReport | None:
    """`run_audit` by the processes of a job, each with its own blocks: the first returns the report, the others None."""
    progress = progress or Silent()
    clock, started = Clock(), datetime.now(UTC)
    if checkpoint is None:
        checkpoint = _load_sharded(job, config, progress, clock) if config.shard else None
    opened = job.together(_open, config, checkpoint, progress, clock)
    checkpoint, measurement, blocks = opened.checkpoint, opened.measurement, opened.cut.blocks
    config, head = replace(config, block_size=blocks.size), measurement.head

    # The way back recomputes layer by layer on the first process alone, which has only its part of a divided layer.
    count = 0 if config.shard else min(config.gradient_blocks, blocks.count)
    kept = KeptForwards(checkpoint.model, count, GraphRoom.of_device(head.weight_VD.device))
    tails, finished = text_pass(
        config,
        checkpoint,
        measurement,
        blocks,
        kept,
        folder=folder,
        resume=resume,
        progress=progress,
        clock=clock,
        job=job,
        by_block=by_block,
    )
    if not job.first:
        return None
    complete = finished == blocks.count
    gradient: DiagnosticGradients | None = None
    router: RouterFindings | None = None
    if complete and count:
        batch = DiagnosticBatch.of_blocks(blocks, count, head.weight_VD.device, config.batch_blocks, kept.made)
        try:
            with clock("gradient"):
                gradient = diagnostic_gradients(checkpoint, measurement, batch, progress)
        except KeyboardInterrupt:
            complete = False
    if complete and not config.shard:
        with clock("router"):
            router = router_section(checkpoint, blocks, max(1, count))
    return audit_report(
        AuditMeasurements(
            config=config,
            checkpoint=checkpoint,
            corpus=opened.corpus,
            blocks=blocks,
            measurement=measurement,
            agreement=opened.agreement,
            tails=tails,
            finished_blocks=finished,
            gradient=gradient,
            router=router,
            complete=complete,
            clock=clock,
            started=started,
            command=command,
            notes=opened.cut.notes,
        )
    )


@dataclass(frozen=True)
class _Opened:
    """What an audit measures: a checked model and its text."""

    checkpoint: Checkpoint
    corpus: Corpus
    cut: ModelBlocks
    agreement: float
    measurement: Measurement


def _open(config: AuditConfig, checkpoint: Checkpoint | None, progress: Progress, clock: Clock) -> _Opened:
    """Load the model where none is given, read the text, check both."""
    if checkpoint is None:
        checkpoint = _load(config, progress, clock)
    head = find_head(checkpoint)
    with clock("text"), progress.step("reading text", None):
        corpus = open_corpus(config.texts, config.corpus, config.text_field)
        cut = model_blocks(
            checkpoint, corpus, size=config.block_size, count=config.blocks, bos=config.bos, offset=config.offset
        )
    with clock("check"), progress.step("checking the head", None):
        agreement = check_head(checkpoint, head, cut.blocks.inputs(0, 1)[0])
    with clock("spectrum"), progress.step("spectrum of the head", None):
        measurement = measurement_of(
            head,
            resolve_vocab(config.valid_vocab, head.vocab, len(checkpoint.tokenizer)),
            coef=config.diag_coef,
            gain_beta=config.gain_beta,
            svd=config.svd,
            seed=config.seed,
        )
    _check_token_ids(cut.blocks, measurement.vocab)
    return _Opened(checkpoint, corpus, cut, agreement, measurement)


def _load_sharded(job: Job, config: AuditConfig, progress: Progress, clock: Clock) -> Checkpoint:
    """The model with its layers divided; one process after the other loads it, so that one whole model is in memory."""
    if job.ranks == 1:
        raise InputError("`shard` divides a model over several processes: start them with torchrun.")

    def load(turn: int) -> Checkpoint | None:
        if turn != job.rank:
            return None
        checkpoint = _load(config, progress, clock)
        shard_layers_(checkpoint.model, job)
        return checkpoint

    own = [job.together(load, turn) for turn in range(job.ranks)][job.rank]
    assert own is not None
    return own


def _load(config: AuditConfig, progress: Progress, clock: Clock) -> Checkpoint:
    name = config.model if len(config.model) <= 40 else "…" + config.model[-39:]
    with clock("load"), progress.step(f"loading {name}", None):
        return load_checkpoint(
            config.model,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
            allow_pickle=config.allow_pickle,
        )


def _check_token_ids(blocks: Blocks, vocab: int) -> None:
    """Every token of the text has a row of the head inside log Z."""
    largest = int(blocks.stream.max())
    if largest >= vocab:
        raise InputError(
            f"`valid_vocab` leaves {vocab} rows of the head, but the text has the token id {largest}: "
            f"give at least {largest + 1}, or 'tokenizer'."
        )
