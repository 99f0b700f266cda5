"""One audit: load, check, one pass over the text, gradients on a diagnostic batch, report.

The pass saves its state periodically, stops between batches on Ctrl-C, and resumes after the last finished block.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.report import audit_report, router_section
from zloss.console import Clock, Progress, Silent, held_interrupts
from zloss.distributed import Job
from zloss.errors import InputError
from zloss.measure.block_values import BlockValues
from zloss.measure.diagnostic_batch import DiagnosticBatch
from zloss.measure.diagnostic_gradients import DiagnosticGradients, diagnostic_gradients
from zloss.measure.geometry_plane import has_plane
from zloss.measure.graph_room import GraphRoom
from zloss.measure.measurement import Measurement, measurement_of, resolve_vocab
from zloss.measure.model_blocks import ModelBlocks, model_blocks
from zloss.measure.sharded_layers import InStep, shard_layers_
from zloss.measure.tails import Tails
from zloss.measure.token_pass import KeptForwards, TokenPass
from zloss.models.checkpoint import Checkpoint, load_checkpoint, model_fingerprint
from zloss.models.output_head import check_head, find_head, hidden_states
from zloss.results.audit import AuditReport
from zloss.results.router import RouterFindings
from zloss.results.writing import write_bytes
from zloss.streaming.accumulator import State
from zloss.streaming.over_ranks import from_bytes, to_bytes
from zloss.text import Blocks, Corpus, open_corpus


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

    `folder` holds the state of an unfinished pass; `checkpoint` is a model that is already loaded; `by_block` receives
    the tokens of the pass block by block, and such an audit cannot be resumed.
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
    """`run_audit` on the processes of a job, which share the blocks: the first returns the report, the others None."""
    progress = progress or Silent()
    clock, started = Clock(), datetime.now(UTC)
    if checkpoint is None and config.shard:
        checkpoint = _load_sharded(job, config, progress, clock)
    checkpoint, corpus, cut, agreement, measurement = job.together(_open, config, checkpoint, progress, clock)
    blocks, head = cut.blocks, measurement.head
    config = replace(config, block_size=blocks.size)

    # The backward pass recomputes each layer on the first process alone, which holds only its part of a sharded layer.
    count = 0 if config.shard else min(config.gradient_blocks, blocks.count)
    kept = KeptForwards(checkpoint.model, count, GraphRoom.of_device(head.weight_VD.device))
    tails, finished = _text_pass(
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
        config,
        checkpoint,
        corpus,
        blocks,
        measurement,
        tails,
        agreement=agreement,
        finished_blocks=finished,
        gradient=gradient,
        gradient_blocks=count,
        router=router,
        complete=complete,
        clock=clock,
        started=started,
        command=command,
        notes=cut.notes,
    )


def _open(
    config: AuditConfig, checkpoint: Checkpoint | None, progress: Progress, clock: Clock
) -> tuple[Checkpoint, Corpus, ModelBlocks, float, Measurement]:
    """(model, text, its blocks, agreement of the logits, measurement): loaded where needed, and checked."""
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
    largest = int(cut.blocks.stream.max())
    if largest >= measurement.vocab:
        raise InputError(
            f"`valid_vocab` leaves {measurement.vocab} rows of the head, but the text has the token id {largest}: "
            f"give at least {largest + 1}, or 'tokenizer'."
        )
    return checkpoint, corpus, cut, agreement, measurement


def _load_sharded(job: Job, config: AuditConfig, progress: Progress, clock: Clock) -> Checkpoint:
    """The model with sharded layers; processes load it one after another, so that memory holds one whole model at a time."""
    if job.ranks == 1:
        raise InputError("`shard` divides a model over several processes: start them with torchrun.")

    def load(turn: int) -> Checkpoint | None:
        if turn != job.rank:
            return None
        checkpoint = _load(config, progress, clock)
        shard_layers_(checkpoint.model, job)
        return checkpoint

    loaded = [job.together(load, turn) for turn in range(job.ranks)][job.rank]
    assert loaded is not None
    return loaded


def _load(config: AuditConfig, progress: Progress, clock: Clock) -> Checkpoint:
    name = config.model if len(config.model) <= 40 else "…" + config.model[-39:]
    with clock("load"), progress.step(f"loading {name}", None):
        return load_checkpoint(
            config.model,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
            allow_pickle=config.allow_pickle,
        )


def _text_pass(
    config: AuditConfig,
    checkpoint: Checkpoint,
    measurement: Measurement,
    blocks: Blocks,
    kept: KeptForwards,
    *,
    folder: Path | None,
    resume: bool,
    progress: Progress,
    clock: Clock,
    job: Job,
    by_block: BlockValues | None = None,
) -> tuple[Tails, int]:
    """(accumulators, finished blocks); fewer blocks than `blocks` after Ctrl-C.

    Each process of a job reads its share of the blocks; at the end the first process has the accumulators of all of them.
    `by_block` is not part of a saved state, so a pass with it cannot be resumed.

    The first Ctrl-C takes effect between two batches, and the finished blocks are saved. A second one ends the pass
    immediately: the last saved state remains, because the accumulators may hold half a batch.
    """
    if by_block is not None and resume:
        raise InputError("a pass with `by_block` cannot be resumed: turn `resume` off.")
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        in_step = InStep(job, hidden_of, lambda: blocks.inputs(0, 1).to(measurement.head.weight_VD.device))
        run = in_step if config.shard else hidden_of
        token_pass = TokenPass(measurement, blocks, run, config.batch_blocks, kept)
        tails = Tails(measurement, plane=has_plane(measurement), seed=config.seed)
        mine = job.local_range(blocks.count, config.batch_blocks)
        saved = SavedPass(
            folder,
            f"{config.fingerprint(blocks.fingerprint())}-{tails.layout()}",
            lambda: model_fingerprint(checkpoint),
            job=job,
        )
        finished = mine.start
        if resume and (earlier := saved.load()) is not None:
            finished, state = earlier
            tails.restore(state)
        with clock("pass"), progress.step("audit", len(mine) * blocks.size) as step, held_interrupts() as release:
            shown = finished
            step.advance((shown - mine.start) * blocks.size)

            def after_batch(finished: int) -> bool:
                nonlocal shown
                try:
                    batch, shown = finished - shown, finished
                    step.advance(batch * blocks.size)
                    saved.save(finished, tails.state)
                    release()
                except KeyboardInterrupt:
                    saved.save(finished, tails.state, now=True)
                    return False
                return True

            finished = token_pass.run(tails, after_batch, finished=finished, end=mine.stop, by_block=by_block)
            if config.shard:
                in_step.finish()
    if job.ranks > 1:
        saved.save(finished, tails.state, now=True)  # another rank may still be lost
        tails.join(job.gather)
    total = sum(job.gather(finished - mine.start))
    if finished == mine.stop:
        saved.clear()
    return tails, total


STATE_FILE = "audit-state.npz"
SAVE_EVERY_SECONDS = 15.0
"""Seconds between two saves, so a killed audit loses no more work than that; $ZLOSS_SAVE_EVERY overrides it."""


class SavedPass:
    """The file with the accumulators, the number of finished blocks, and the fingerprints of the pass and of the model.

    The fingerprint of the pass covers the settings of the audit, its tokens, and the layout of the accumulators. That of
    the model takes seconds, so it is computed only when a state is read or written.
    """

    def __init__(
        self, folder: Path | None, fingerprint: str, model: Callable[[], str], *, job: Job | None = None
    ) -> None:
        name = STATE_FILE
        if job is not None and job.ranks > 1:
            # The blocks of a rank depend on the number of ranks, so a state saved with another number does not apply.
            name = f"audit-state-{job.rank}-of-{job.ranks}.npz"
        self._path = None if folder is None else folder / name
        self._fingerprint = fingerprint
        self._model = functools.cache(model)
        self._interval = _interval()
        self._saved_at = time.monotonic()

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """(finished blocks, accumulator state); None if there is nothing to resume."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            state = from_bytes(self._path.read_bytes())
            fingerprint, finished = str(state.pop("fingerprint")), int(state.pop("finished_blocks"))
            model = str(state.pop("model", "unknown"))
        except Exception as error:
            raise InputError(f"{self._path} cannot be read ({error}): delete it, or turn `resume` off.") from error
        if fingerprint != self._fingerprint:
            raise InputError(
                f"{self._path} belongs to another audit (its model, text, blocks or options differ, "
                "or another version of zloss wrote it): use the same options, or turn `resume` off."
            )
        if model != self._model():
            raise InputError(
                f"{self._path} belongs to another model: its weights or its config differ from those of the model now. "
                "Use the model with which the audit began, or turn `resume` off."
            )
        return finished, state

    def save(self, finished_blocks: int, state: Callable[[], State], *, now: bool = False) -> None:
        """Write the state if the last save is older than the interval, or if `now`."""
        if self._path is None or (not now and time.monotonic() - self._saved_at < self._interval):
            return
        head = {"fingerprint": self._fingerprint, "model": self._model(), "finished_blocks": finished_blocks}
        write_bytes(self._path, to_bytes({**head, **state()}))
        self._saved_at = time.monotonic()

    def clear(self) -> None:
        """Delete the file, because the pass is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _interval() -> float:
    """Seconds between two saves, from the environment."""
    value = os.environ.get("ZLOSS_SAVE_EVERY", str(SAVE_EVERY_SECONDS))
    try:
        return float(value)
    except ValueError as error:
        raise InputError(f"ZLOSS_SAVE_EVERY is expected to be a number of seconds, but is {value!r}.") from error
