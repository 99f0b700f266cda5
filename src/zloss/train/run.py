"""One training run, from its start or from its last checkpoint to its metrics."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from zloss.console.interrupt import held_interrupts
from zloss.console.progress import Progress, Silent
from zloss.models.checkpoint import Checkpoint
from zloss.optimizer.recorder import Recorder
from zloss.ranks.job import Job
from zloss.results.folder_writing import whole_folder
from zloss.results.provenance import write_run_provenance
from zloss.results.run_metrics import RunMetrics, write_metrics
from zloss.results.train_config import TrainConfig
from zloss.train.data.micro_batches import check_divisible
from zloss.train.folder.metrics import run_metrics
from zloss.train.folder.provenance import run_provenance
from zloss.train.folder.run_folder import check_alike, mark_unfinished, run_in_folder
from zloss.train.folder.saved_state import SavedState
from zloss.train.folder.step_log import StepLog
from zloss.train.run_options import RunOptions
from zloss.train.start.accelerator import close_accelerator, make_accelerator
from zloss.train.start.adamw import make_adamw
from zloss.train.start.data_parallel import prepared
from zloss.train.start.run_start import Start, initial_checkpoint
from zloss.train.step.live import LiveView, NoView
from zloss.train.step.live_validation import LiveValidation
from zloss.train.step.loss_model import LossModel
from zloss.train.step.objective import run_objective
from zloss.train.step.optimizer_step import OptimizerStep
from zloss.train.step.run_loss import run_loss
from zloss.train.step.telemetry import step_window
from zloss.train.step.tracker_errors import quiet_tracker_threads, tracker_errors
from zloss.train.step.tracking import tracked


def run_training(
    config: TrainConfig,
    start: Start,
    folder: Path,
    *,
    options: RunOptions | None = None,
    view: LiveView | None = None,
    progress: Progress | None = None,
) -> RunMetrics:
    """Train and evaluate. config.json, steps.jsonl, metrics.json and provenance.json are in `folder` afterwards.

    Where `folder` holds unfinished work of the same run, training goes on from its last checkpoint, with the same losses as
    in a run that was never interrupted. A folder in which another process works is refused.
    """
    metrics = run_training_of(Job(), config, start, folder, options=options, view=view, progress=progress)
    assert metrics is not None
    return metrics


def run_training_of(
    job: Job,
    config: TrainConfig,
    start: Start,
    folder: Path,
    *,
    options: RunOptions | None = None,
    view: LiveView | None = None,
    progress: Progress | None = None,
) -> RunMetrics | None:
    """`run_training` by the processes of a job, each with its own blocks of every step; the first one writes and returns.

    The run is the same on any number of processes but for rounding, and may go on on another number of them.
    """
    config = start.settled(config)
    job.together(check_divisible, config, job)
    with run_in_folder(folder, config, start, job) as identity, quiet_tracker_threads():
        shown = view if view is not None and job.first else NoView()
        return _train(job, config, start, folder, identity, options or RunOptions(), shown, progress or Silent())


def _train(
    job: Job,
    config: TrainConfig,
    start: Start,
    folder: Path,
    identity: str,
    options: RunOptions,
    view: LiveView,
    progress: Progress,
) -> RunMetrics | None:
    """`run_training_of` in a folder that the first process holds."""
    data, began, objective = start.data, time.time(), run_objective(config)
    accelerator = make_accelerator(config, folder, options.trackers, job)
    checkpoint = initial_checkpoint(start, config)
    plain = run_loss(config, checkpoint, data)
    loss_model, optimizer = prepared(accelerator, plain, make_adamw(plain, config), job, config, data)
    recorder = Recorder(
        loss_model.parameters(),
        optimizer,
        clip=config.clip,
        adam_every=config.adam_every,
        group=job.group,
        micro_batches_add_up=True,
    )
    validated = LossModel(checkpoint, objective, config.head, data.valid.counted)
    step_of_run = OptimizerStep(
        config,
        data,
        job,
        accelerator,
        loss_model,
        optimizer,
        recorder,
        window=step_window(objective, deployed=config.head == "paper"),
        validation=LiveValidation(validated, config, data, options.validate_every),
    )
    saved = SavedState(folder, identity, job)
    done, recorder.records = job.together(saved.load, accelerator)
    job.together(check_alike, job.everyone(done), "checkpoints: they need one folder that all of them read")
    loss_model.train()
    if job.first:
        mark_unfinished(folder)
    with (
        StepLog(folder, recorder.records) if job.first else nullcontext() as log,
        view.run(config.name, config.steps, done) as shown,
        # The loop seeds the global generators step by step; the caller gets them back as they were.
        torch.random.fork_rng(),
        held_interrupts() as release,
    ):
        try:
            for step in range(done + 1, config.steps + 1):
                record = step_of_run.take(step)
                if log is not None:
                    log.append(record)
                shown.show(record, config.tokens_per_step)
                if options.trackers:
                    with tracker_errors():
                        accelerator.log(tracked(record), step=step)
                done = step
                if options.checkpoint_every and (step % options.checkpoint_every == 0 or step == config.steps):
                    saved.save(accelerator, step, recorder.records)
                job.interrupted_together(release)
        except KeyboardInterrupt:
            if options.checkpoint_every and done % options.checkpoint_every:
                saved.save(accelerator, done, recorder.records)
            raise
    metrics = run_metrics(config, checkpoint, data, recorder.records, progress, job)
    if metrics is None:
        close_accelerator(accelerator)
        return None
    if options.save_model:
        _save_model(checkpoint, folder)
    write_run_provenance(folder, run_provenance(options.command, began, recorder.records))
    write_metrics(folder, metrics)
    saved.clear()
    close_accelerator(accelerator)
    return metrics


def _save_model(checkpoint: Checkpoint, folder: Path) -> None:
    model: Any = checkpoint.model
    with whole_folder(folder / "model") as part:
        model.save_pretrained(part)
        checkpoint.tokenizer.save_pretrained(part)
