"""One audit: load, check, one pass over the text, gradients on a diagnostic batch, report.

The pass writes its token table in parts, stops between batches on Ctrl-C, and resumes after the last part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from torch import Tensor

from zloss.audit.checkpoint.report import audit_report, router_section
from zloss.audit.checkpoint.token_files import ParquetColumns, TokenParts, gathered_parts, write_parquet
from zloss.audit.config import AuditConfig
from zloss.console import Clock, Progress, Silent, held_interrupts
from zloss.errors import InputError
from zloss.jobs import Job
from zloss.measure.gradients import diagnostic_gradients
from zloss.measure.logit_noise import NOISE_BLOCKS, block_tokens, logit_noise
from zloss.measure.measurement import (
    Measurement,
    ModelBlocks,
    check_token_ids,
    measurement_of,
    model_blocks,
    resolve_vocab,
)
from zloss.measure.tokens import Columns, TokenSample, concatenated, has_plane, token_batches
from zloss.models.checkpoint import Checkpoint, is_offloaded, load_checkpoint, model_fingerprint, tokenizer_size
from zloss.models.output_head import check_head, find_head, has_graph, hidden_states
from zloss.results.audit import AuditReport, GradientInfo, LogitNoise, PathNumbers
from zloss.results.folder import TOKENS_FILE
from zloss.results.router import RouterFindings
from zloss.text import Blocks, Corpus, open_corpus


def run_audit(
    config: AuditConfig,
    *,
    folder: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    command: str = "zloss.audit.checkpoint.run.run_audit",
    checkpoint: Checkpoint | None = None,
    noise: bool = True,
) -> AuditReport:
    """The report of one audit, without its decisions; Ctrl-C during the pass gives a partial report.

    `folder` gets tokens.parquet and holds the parts of an unfinished pass; `checkpoint` is a model that is already loaded.
    Without `noise`, the noise of 16-bit logits is not measured, and a verdict cannot weigh the shift.
    """
    found = run_audit_of(
        Job(),
        config,
        folder=folder,
        resume=resume,
        progress=progress,
        command=command,
        checkpoint=checkpoint,
        noise=noise,
    )
    assert found is not None
    return found.report


@dataclass(frozen=True)
class Audited:
    """A finished or interrupted audit."""

    report: AuditReport
    columns: Columns
    """The columns of all tokens that the report covers."""
    measurement: Measurement


def run_audit_of(
    job: Job,
    config: AuditConfig,
    *,
    folder: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    command: str = "zloss.audit.checkpoint.run.run_audit",
    checkpoint: Checkpoint | None = None,
    blocks: Blocks | None = None,
    noise: bool = True,
) -> Audited | None:
    """`run_audit` on the processes of a job, which share the blocks: the first returns what was found, the others None.

    `blocks`: the blocks to read instead of the text in the configuration.
    """
    progress = progress or Silent()
    clock, started = Clock(), datetime.now(UTC)
    checkpoint, corpus, cut, agreement, measurement = job.together(
        _open, config, checkpoint, blocks, progress, clock, job
    )
    blocks, head = cut.blocks, measurement.head
    config = replace(config, block_size=blocks.size)
    parts = TokenParts(
        folder,
        config.fingerprint(blocks.fingerprint()),
        lambda: model_fingerprint(checkpoint),
        TokenSample(head.width if has_plane(measurement) else 0, config.seed),
        job,
    )
    first_states: dict[int, Tensor] = {}
    finished = _text_pass(
        config,
        checkpoint,
        measurement,
        blocks,
        parts,
        first_states,
        resume=resume,
        progress=progress,
        clock=clock,
        job=job,
    )
    with clock("tokens"):
        columns = _joined(job, parts, {"target": repr(measurement.target), "diag_coef": repr(config.diag_coef)})
    if not job.first:
        if finished == blocks.count:
            parts.clear()
        return None
    complete, offloaded = finished == blocks.count, is_offloaded(checkpoint.model)
    # The weights of an offloaded layer are on a device only while the layer runs.
    count = 0 if offloaded else min(config.gradient_blocks, blocks.count)
    gradient: tuple[GradientInfo, dict[str, PathNumbers], dict[str, float | None]] | None = None
    found_noise: LogitNoise | None = None
    router: tuple[RouterFindings, float | None] | None = None
    try:
        if complete and count:
            with clock("gradient"):
                gradient = diagnostic_gradients(
                    checkpoint,
                    measurement,
                    blocks,
                    count,
                    target=config.target,
                    forward_blocks=config.batch_blocks,
                    progress=progress,
                )
        if complete and noise:
            with clock("logits"), progress.step("16-bit logits", None), hidden_states(checkpoint, head) as hidden_of:
                found_noise = logit_noise(
                    head,
                    block_tokens(hidden_of, blocks, head.weight_VD.device, config.batch_blocks, first_states),
                    vocab=measurement.vocab,
                    mean_row_D=None if measurement.lacks_centered else measurement.mean_row_D / head.logit_scale,
                    saved_dtype=checkpoint.stored_dtype or head.weight_VD.dtype,
                )
    except KeyboardInterrupt:
        complete = False
    if complete and not offloaded:
        with clock("router"):
            router = router_section(config, checkpoint, measurement, blocks, max(1, count))
    report = audit_report(
        config,
        checkpoint,
        corpus,
        blocks,
        measurement,
        columns,
        parts.sample,
        agreement=agreement,
        finished_blocks=finished,
        gradient=gradient,
        gradient_blocks=count,
        noise=found_noise,
        router=router,
        complete=complete,
        clock=clock,
        started=started,
        command=command,
        notes=cut.notes,
    )
    if folder is not None and isinstance(columns, ParquetColumns):
        columns.move(folder / TOKENS_FILE)
    if complete:
        parts.clear()
    return Audited(report, columns, measurement)


def _open(
    config: AuditConfig,
    checkpoint: Checkpoint | None,
    blocks: Blocks | None,
    progress: Progress,
    clock: Clock,
    job: Job,
) -> tuple[Checkpoint, Corpus, ModelBlocks, float | None, Measurement]:
    """(model, text, its blocks, agreement of the logits, measurement): loaded where needed, and checked."""
    if config.device_map is not None and job.ranks > 1:
        raise InputError(
            f"`device_map` places one model on the devices of one process, but there are {job.ranks} processes: start the audit "
            "without torchrun, or leave `device_map` out."
        )
    if checkpoint is None:
        name = config.model if len(config.model) <= 40 else "…" + config.model[-39:]
        with clock("load"), progress.step(f"loading {name}", None):
            checkpoint = load_checkpoint(
                config.model,
                dtype=config.dtype,
                trust_remote_code=config.trust_remote_code,
                allow_pickle=config.allow_pickle,
                tokenizer=config.tokenizer,
                device_map=config.device_map,
            )
    head = find_head(checkpoint)
    with clock("text"), progress.step("reading text", None):
        if blocks is None:
            corpus = open_corpus(config.texts, config.corpus, config.text_field)
            cut = model_blocks(
                checkpoint, corpus, size=config.block_size, count=config.blocks, bos=config.bos, offset=config.offset
            )
        else:
            corpus = Corpus(blocks.name, iter(()), provenance={"fingerprint": blocks.fingerprint()})
            cut = ModelBlocks(blocks, ())
            check_token_ids(checkpoint, blocks)
    with clock("check"), progress.step("checking the head", None):
        first_N = cut.blocks.inputs(0, 1)[0]
        agreement = check_head(checkpoint, head, first_N)
        if checkpoint.custom is not None and config.gradient_blocks and not has_graph(checkpoint, head, first_N):
            raise InputError(
                "`hidden_of` returns hidden states without a graph, so no gradient can be taken: remove torch.no_grad and "
                "detach from it, or set `gradient_blocks` to 0."
            )
    with clock("spectrum"), progress.step("spectrum of the head", None):
        measurement = measurement_of(
            head,
            resolve_vocab(config.valid_vocab, head.vocab, tokenizer_size(checkpoint.tokenizer)),
            coef=config.diag_coef,
            gain_beta=config.gain_beta,
            svd=config.svd,
            seed=config.seed,
        )
    largest = int(cut.blocks.stream.max())
    if largest >= measurement.vocab:
        raise InputError(
            f"`valid_vocab` leaves {measurement.vocab} rows of the head, but the text has the token id {largest}: "
            f"use at least {largest + 1}, or 'tokenizer'."
        )
    return checkpoint, corpus, cut, agreement, measurement


def _text_pass(
    config: AuditConfig,
    checkpoint: Checkpoint,
    measurement: Measurement,
    blocks: Blocks,
    parts: TokenParts,
    first_states: dict[int, Tensor],
    *,
    resume: bool,
    progress: Progress,
    clock: Clock,
    job: Job,
) -> int:
    """Read the blocks of this rank into `parts`, and return how many blocks all ranks have finished: fewer after Ctrl-C.

    The first Ctrl-C takes effect between two batches, and the finished blocks are saved. A second one ends the pass immediately,
    and the parts that are on disk remain. `first_states` receives the hidden states of the batches that `block_tokens` reads.
    """
    mine = job.local_range(blocks.count, config.batch_blocks)
    finished = parts.resume(mine.start) if resume else mine.start
    if not resume:
        parts.clear()
    with (
        clock("pass"),
        progress.step("audit", len(mine) * blocks.size) as step,
        hidden_states(checkpoint, measurement.head) as hidden_of,
        held_interrupts() as release,
    ):

        def kept(ids_BN: Tensor) -> Tensor:
            hidden_BND = hidden_of(ids_BN)
            if finished < NOISE_BLOCKS:  # the first block of this batch
                first_states[finished] = blocks.counted(hidden_BND).flatten(0, 1)
            return hidden_BND

        step.advance((finished - mine.start) * blocks.size)
        batches = token_batches(
            measurement, blocks, kept, config.batch_blocks, range(finished, mine.stop), parts.sample
        )
        for stop, columns in batches:
            start, finished = finished, stop
            parts.add(start, finished, columns)
            try:
                step.advance((finished - start) * blocks.size)
                release()
            except KeyboardInterrupt:
                break
    if job.ranks > 1 or finished < mine.stop:
        parts.save()  # another rank may still fail
    return sum(job.all_gather(finished - mine.start))


def _joined(job: Job, parts: TokenParts, facts: dict[str, str]) -> Columns:
    """The columns of all ranks on the first one: in memory, or with a folder in a Parquet file next to the parts."""
    everything = gathered_parts(job, parts)
    columns: Columns
    if job.first and parts.folder is not None:
        columns = write_parquet(parts.folder / TOKENS_FILE, everything, facts)
    else:
        columns = concatenated(list(everything))
    job.all_gather(None)  # until then every rank keeps its parts
    return columns
