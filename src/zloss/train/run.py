"""One training run, from its start or from its last checkpoint to its metrics."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zloss.console import Progress, Silent, held_interrupts
from zloss.distributed import Job
from zloss.models.checkpoint import Checkpoint
from zloss.optimizer.recorder import Recorder
from zloss.results.folder_writing import whole_folder
from zloss.results.provenance import write_run_provenance
from zloss.results.run_metrics import RunMetrics, write_metrics
from zloss.results.step_record import StepRecord
from zloss.results.train_config import TrainConfig
from zloss.train.data.micro_batches import check_divisible
from zloss.train.ending import EndingRule, RunEndedError
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
    ending: EndingRule | None = None,
) -> RunMetrics | None:
    """`run_training` by the processes of a job, each with its own blocks of every step; the first one writes and returns.

    The run is the same on any number of processes but for rounding, and may go on on another number of them. Where the
    `ending` rule of the first process gives a reason, all of them leave with a `RunEndedError`.
    """
    config = start.settled(config)
    job.together(check_divisible, config, job)
    with run_in_folder(folder, config, start, job) as identity, quiet_tracker_threads():
        run = _Run(
            job=job,
            config=config,
            start=start,
            folder=folder,
            options=options or RunOptions(),
            view=view if view is not None and job.first else NoView(),
            progress=progress or Silent(),
            ending=ending,
        )
        return run.train(identity)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run in a folder that the first process holds."""

    job: Job
    config: TrainConfig
    start: Start
    folder: Path
    options: RunOptions
    view: LiveView
    progress: Progress
    ending: EndingRule | None

    def train(self, identity: str) -> RunMetrics | None:
        """Load, train, evaluate, write."""
        config, job, began = self.config, self.job, time.time()
        accelerator = make_accelerator(config, self.folder, self.options.trackers, job)
        checkpoint = initial_checkpoint(self.start, config)
        step_of_run = self._prepared_step(accelerator, checkpoint)
        saved = SavedState(self.folder, identity, job)
        try:
            records = self._take_steps(step_of_run, saved)
        except RunEndedError:
            close_accelerator(accelerator)
            raise
        metrics = run_metrics(config, checkpoint, self.start.data, records, self.progress, job)
        if metrics is not None:
            if self.options.save_model:
                _save_model(checkpoint, self.folder)
            write_run_provenance(self.folder, run_provenance(self.options.command, began, records))
            write_metrics(self.folder, metrics)
            saved.clear()
        close_accelerator(accelerator)
        return metrics

    def _prepared_step(self, accelerator: Any, checkpoint: Checkpoint) -> OptimizerStep:
        """Loss, optimizer, recorder and telemetry of the run, on its device and in its group."""
        config, data, job, objective = self.config, self.start.data, self.job, run_objective(self.config)
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
        return OptimizerStep(
            config,
            data,
            job,
            accelerator,
            loss_model,
            optimizer,
            recorder,
            window=step_window(objective, deployed=config.head == "paper"),
            validation=LiveValidation(validated, config, data, self.options.validate_every),
        )

    def _take_steps(self, step_of_run: OptimizerStep, saved: SavedState) -> list[StepRecord]:
        """Every step after those of the last checkpoint; the records of all of them."""
        config, job, options, accelerator = self.config, self.job, self.options, step_of_run.accelerator
        recorder = step_of_run.recorder
        done, recorder.records = job.together(saved.load, accelerator)
        job.together(check_alike, job.all_gather(done), "checkpoints: they need one folder that all of them read")
        step_of_run.loss_model.train()
        if job.first:
            mark_unfinished(self.folder)
        with (
            StepLog(self.folder, recorder.records) if job.first else nullcontext() as log,
            self.view.run(config.name, config.steps, done) as shown,
            # The loop seeds the global generators step by step; the caller gets them back as they were.
            torch.random.fork_rng(),
            held_interrupts() as release,
        ):
            kept, whole, reason = done, True, None

            def finish(record: StepRecord) -> str | None:
                """Log, show and keep a step; the reason why the run ends with it."""
                nonlocal kept
                if log is not None:
                    log.append(record)
                shown.show(record, config.tokens_per_step)
                if options.trackers:
                    with tracker_errors():
                        accelerator.log(tracked(record), step=record.step)
                found = self._reason_to_end(recorder.records)
                last = record.step == config.steps
                if found is None and options.checkpoint_every and (last or record.step % options.checkpoint_every == 0):
                    saved.save(accelerator, record.step, recorder.records)
                    kept = record.step
                return found

            try:
                # A run that was interrupted in the step that ends it ends there again.
                reason = job.between_steps(lambda: self._reason_to_end(recorder.records), release)
                while reason is None and done < config.steps:
                    whole = False
                    record = step_of_run.take(done + 1)
                    whole, done = True, record.step
                    reason = job.between_steps(partial(finish, record), release)
            except KeyboardInterrupt:
                # A second Ctrl-C may come inside a step: what is half done is not kept.
                if options.checkpoint_every and whole and done > kept:
                    saved.save(accelerator, done, recorder.records)
                raise
        if reason is not None:
            raise RunEndedError(done, reason)
        return recorder.records

    def _reason_to_end(self, records: list[StepRecord]) -> str | None:
        """What the ending rule says of the steps so far; only the first process asks it."""
        return self.ending(records) if self.ending is not None and self.job.first and records else None


def _save_model(checkpoint: Checkpoint, folder: Path) -> None:
    model: Any = checkpoint.model
    with whole_folder(folder / "model") as part:
        model.save_pretrained(part)
        checkpoint.tokenizer.save_pretrained(part)
