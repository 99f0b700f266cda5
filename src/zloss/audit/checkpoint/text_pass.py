"""The pass of an audit over its text: saved now and then, interrupted between batches, resumed where it stopped."""

from __future__ import annotations

from pathlib import Path

from zloss.audit.checkpoint.clock import Clock
from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.resume import SavedPass
from zloss.console.interrupt import held_interrupts
from zloss.console.progress import Progress
from zloss.errors import InputError
from zloss.measure.block_values import BlockValues
from zloss.measure.geometry_plane import has_plane
from zloss.measure.measurement import Measurement
from zloss.measure.sharded_layers import InStep
from zloss.measure.tails import Tails
from zloss.measure.token_pass import KeptForwards, TokenPass
from zloss.models.checkpoint import Checkpoint
from zloss.models.hidden_states import hidden_states
from zloss.models.weight_fingerprint import model_fingerprint
from zloss.ranks.job import Job
from zloss.text.blocks import Blocks


def text_pass(
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
    """(accumulators, finished blocks); fewer blocks than there are after Ctrl-C.

    Of several processes each passes over its own blocks; the first one has the accumulators of all at the end.
    `by_block` takes the same tokens block by block; it is not part of a saved state, so such a pass cannot be resumed.

    The first Ctrl-C takes effect between two batches, and what is finished is saved. A second one ends the pass at once:
    then the last saved state stands, because the accumulators may hold half a batch.
    """
    if by_block is not None and resume:
        raise InputError("a pass with `by_block` cannot be resumed: turn `resume` off.")
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        in_step = InStep(job, hidden_of, lambda: blocks.inputs(0, 1).to(measurement.head.weight_VD.device))
        run = in_step if config.shard else hidden_of
        token_pass = TokenPass(measurement, blocks, run, config.batch_blocks, kept)
        tails = Tails(measurement, plane=has_plane(measurement), seed=config.seed)
        own = job.own_range(blocks.count, config.batch_blocks)
        saved = SavedPass(
            folder,
            f"{config.fingerprint(blocks.fingerprint())}-{tails.layout()}",
            lambda: model_fingerprint(checkpoint),
            job=job,
        )
        finished = own.start
        if resume and (earlier := saved.load()) is not None:
            finished, state = earlier
            tails.restore(state)
        with clock("pass"), progress.step("audit", len(own) * blocks.size) as step, held_interrupts() as release:
            shown = finished
            step.advance((shown - own.start) * blocks.size)

            def go_on(finished: int) -> bool:
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

            finished = token_pass.run(tails, go_on, finished=finished, end=own.stop, by_block=by_block)
            if config.shard:
                in_step.finish()
    if job.ranks > 1:
        saved.save(finished, tails.state, now=True)  # another rank may still be lost
        tails.join(job.gather)
    total = sum(job.gather(finished - own.start))
    if finished == own.stop:
        saved.clear()
    return tails, total
