"""One training run: load, take the steps, validate, save.

    metrics = run_training(config, prepare_start(config), Path("runs") / config.name)

A run is a function of its configuration. Tokens and dropout of a step follow from seed, step and micro-batch, so a run
that resumes from a checkpoint takes the same steps as one that was never interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zloss.console import Progress, Silent, held_interrupts
from zloss.errors import ZlossError
from zloss.head.centering import mu_center_, mu_loss_
from zloss.jobs import Job
from zloss.models.output_head import find_head
from zloss.optimizer.recorder import Recorder
from zloss.results.folder import whole_folder
from zloss.results.provenance import write_run_provenance
from zloss.results.run_config import MU_CENTERING, MU_LOSS, TrainConfig
from zloss.results.run_metrics import METRICS_FILE, RunMetrics
from zloss.results.steps import StepRecord
from zloss.telemetry.window import StepWindow, micro_batch
from zloss.text import Blocks
from zloss.train.data import check_divisible, micro_batches
from zloss.train.folder import (
    append_step,
    check_alike,
    load_checkpoint,
    remove_checkpoints,
    run_in_folder,
    run_provenance,
    save_checkpoint,
    write_steps,
)
from zloss.train.live import LiveView, NoView, quiet_tracker_threads, tracked, tracker_errors
from zloss.train.loss import run_loss, run_objective, unscaled_penalty
from zloss.train.metrics import run_metrics
from zloss.train.moe import router_numbers
from zloss.train.options import RunOptions
from zloss.train.start import Start, close_accelerator, initial_checkpoint, make_accelerator, make_adamw, prepared

LIVE_BLOCKS = 8
"""The number of validation blocks, from the first one on, that `validate_every` reads: a fraction of the work of one step."""
EndingRule = Callable[[Sequence[StepRecord]], str | None]
"""All steps so far → the reason why the run ends here, or None.

The first process of a job calls it after every step, the last one included, and when a run resumes from a checkpoint.
"""


class RunEndedError(ZlossError):
    """An ending rule ended the run, on all processes after the same step."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"the run ended after step {step}: {reason}")
        self.step, self.reason = step, reason


def run_training(
    config: TrainConfig,
    start: Start,
    folder: Path,
    *,
    options: RunOptions | None = None,
    view: LiveView | None = None,
    progress: Progress | None = None,
    job: Job | None = None,
    ending: EndingRule | None = None,
) -> RunMetrics | None:
    """Train and evaluate. config.json, steps.jsonl, metrics.json and provenance.json are in `folder` afterwards.

    If `folder` holds unfinished work of the same run, training resumes from its last checkpoint, with the same losses as
    in a run that was never interrupted. A folder that another process is using is rejected.
    The processes of a `job` share the blocks of every step; the first one writes and has the metrics, the others None. The
    run is the same on any number of them up to rounding, and may resume on another number. If the `ending` rule of the
    first one gives a reason, all of them raise a `RunEndedError`.
    """
    job = job or Job()
    config, options, data = start.with_block_size(config), options or RunOptions(), start.data
    view = view if view is not None and job.first else NoView()
    job.together(check_divisible, config, job)
    with run_in_folder(folder, config, start, job), quiet_tracker_threads():
        began = time.time()

        # Load the model with its loss and optimizer, and the last checkpoint if there is one.
        accelerator = make_accelerator(config, folder, options.trackers, job)
        checkpoint, objective = initial_checkpoint(start, config), run_objective(config)
        plain = run_loss(config, checkpoint, data.train)
        model, optimizer = prepared(accelerator, plain, make_adamw(plain, config), job, config, data)
        weight_VD = find_head(checkpoint).weight_VD
        recorder = Recorder(
            model.parameters(),
            optimizer,
            clip=config.clip,
            adam_every=config.adam_every,
            group=job.group,
            micro_batches_add_up=True,
        )
        # The paper's path has statistics of logits that are already centered, so log Z needs no shift.
        window = StepWindow(1, "raw" if config.head == "paper" else objective.coordinate, across_ranks=True)
        recorder.records = job.together(load_checkpoint, folder, accelerator)
        done = len(recorder.records)
        job.together(check_alike, job.all_gather(done), "checkpoints: they need one folder that all of them read")
        if job.first:
            # Metrics of an earlier run of the same settings: its log is replaced now.
            (folder / METRICS_FILE).unlink(missing_ok=True)
            write_steps(folder, recorder.records)

        def reason_to_end() -> str | None:
            return ending(recorder.records) if ending is not None and recorder.records else None

        def finish_step() -> str | None:
            """Log, show, track and save the last step; the reason why the run ends there, known to the first rank."""
            reason = None
            if job.first:
                record = recorder.records[-1]
                append_step(folder, record)
                view.show(record, config.tokens_per_step)
                if options.trackers:
                    with tracker_errors():
                        accelerator.log(tracked(record), step=record.step)
                reason = reason_to_end()
                if reason is None and _is_due(record.step, options.checkpoint_every, config.steps):
                    save_checkpoint(folder, accelerator, recorder.records)
            release()
            return reason

        model.train()
        with (
            view.run(config.name, config.steps, done),
            # The loop seeds the global generators step by step; the caller gets them back as they were.
            torch.random.fork_rng(),
            # Ctrl-C waits for the end of the step. A second one interrupts the step, which is then lost.
            held_interrupts() as release,
        ):
            # If the run was interrupted right after the step that ended it, it ends again before taking another one.
            reason = job.from_first(reason_to_end)
            while reason is None and done < config.steps:
                clock, number = time.perf_counter(), done + 1

                # Forward and backward passes of this rank's micro-batches.
                coef = config.coef_at(number)
                plain.objective = run_objective(config, coef)
                routed, unscaled, penalty = [], [], torch.zeros(())
                batches = list(micro_batches(config, data, number, job))
                for batch in batches:
                    torch.manual_seed(batch.seed)
                    inputs, targets = batch.inputs_BT.to(accelerator.device), batch.targets_BT.to(accelerator.device)
                    # DDP averages the gradients of the ranks in the last backward pass of a step.
                    last = batch is batches[-1]
                    with nullcontext() if last or job.ranks == 1 else model.no_sync():
                        out, terms = model(inputs, targets, config.tokens_per_step)
                        # Each rank has its part of the step's loss, and DDP averages gradients: the average of ranks·part is
                        # the sum of the parts.
                        accelerator.backward(out.loss * job.ranks)
                    if config.method == MU_LOSS and last:
                        # It belongs to the step, not to its tokens: it is added once, to the gradients that all ranks share.
                        penalty = mu_loss_(weight_VD, coef)
                    loss, auxiliary = (part * job.ranks + penalty for part in (out.loss, out.auxiliary))
                    recorder.micro_batch(loss, out.cross_entropy * job.ranks, auxiliary)
                    window.add(micro_batch(out, normalizer=config.tokens_per_step))
                    routed.append(terms)
                    if config.coef_until is not None:
                        unscaled.append(unscaled_penalty(config, out, weight_VD))

                # Read the gradients, clip them, update the weights, and complete the record of the step.
                with recorder.step(number) as step:
                    step.lr = config.lr_at(number)
                    for group in optimizer.param_groups:
                        group["lr"] = step.lr
                    window.end_step(step.norm, config.clip)
                    step.telemetry = window.step_tails()
                    if config.moe is not None:
                        passes = [terms for rank in job.all_gather(routed) for terms in rank]
                        step.telemetry |= router_numbers(passes, config.moe, config.tokens_per_step)
                    if config.coef_until is not None:
                        total = sum(value for rank in job.all_gather(unscaled) for value in rank)
                        step.telemetry |= {"coef": coef, "z_unscaled": total if math.isfinite(total) else None}
                    if step.finite:
                        step.clip_()
                        optimizer.step()
                        if config.method == MU_CENTERING:
                            mu_center_(weight_VD)
                    else:
                        # An update with a nonfinite gradient would make all weights nonfinite: it is counted and skipped.
                        step.skip()
                    step.seconds = time.perf_counter() - clock
                    if job.first and _is_due(number, options.validate_every, config.steps):
                        step.telemetry["valid_ce"] = _validation_ce(plain, data.valid, config, accelerator)
                optimizer.zero_grad()
                done = number
                try:
                    reason = job.all_gather(job.together(finish_step))[0]
                except KeyboardInterrupt:
                    if job.first and options.checkpoint_every:
                        save_checkpoint(folder, accelerator, recorder.records)
                    raise
        if reason is not None:
            close_accelerator(accelerator)
            raise RunEndedError(done, reason)

        # Validate and save.
        metrics = run_metrics(
            config,
            config,
            objective,
            checkpoint,
            data.valid,
            recorder.records,
            tokens=(config.steps * config.tokens_per_step, data.train.predictions),
            progress=progress or Silent(),
            job=job,
        )
        if metrics is not None:
            if options.save_model:
                trained: Any = checkpoint.model
                with whole_folder(folder / "model") as part:
                    trained.save_pretrained(part)
                    checkpoint.tokenizer.save_pretrained(part)
            write_run_provenance(folder, run_provenance(options.command, began, recorder.records))
            metrics.write(folder)
            remove_checkpoints(folder)
        close_accelerator(accelerator)
        return metrics


def _is_due(step: int, every: int, last: int) -> bool:
    """Whether something that is done every `every` steps, and after the last one, is done after `step`; never for 0."""
    return bool(every) and (step % every == 0 or step == last)


@torch.no_grad()
def _validation_ce(model: nn.Module, blocks: Blocks, config: TrainConfig, accelerator: Any) -> float:
    """Cross-entropy of the model as it is on the first validation blocks, in nats per token; changes no number of the run."""
    few, total = blocks.first(LIVE_BLOCKS), 0.0
    model.eval()
    with accelerator.autocast():
        for start in range(0, few.count, config.micro_batch):
            index = slice(start, start + config.micro_batch)
            inputs, targets = (part.to(accelerator.device) for part in few.batch(index))
            out, _ = model(inputs, targets, targets.numel())
            total += float(out.cross_entropy) * len(targets)  # the mean over blocks in fp64
    model.train()
    return total / few.count
