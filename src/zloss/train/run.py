"""One training run: load, take the steps, validate, save.

    metrics = run_training(config, prepare_start(config), Path("runs") / config.name)

A run is a function of its configuration. Tokens and dropout of a step follow from seed, step and micro-batch, so a run
that resumes from a checkpoint takes the same steps as one that was never interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zloss.console import Progress, Silent, held_interrupts
from zloss.errors import ZlossError
from zloss.jobs import Job
from zloss.models.checkpoint import Checkpoint
from zloss.optimizer.recorder import Recorder
from zloss.results.folder import whole_folder
from zloss.results.provenance import write_run_provenance
from zloss.results.run_config import TrainConfig
from zloss.results.run_metrics import METRICS_FILE, RunMetrics, write_metrics
from zloss.results.steps import StepRecord
from zloss.telemetry.window import micro_batch
from zloss.train.data import TrainData, check_divisible, micro_batches
from zloss.train.folder import SavedState, StepLog, check_alike, run_in_folder, run_provenance, step_tails, step_window
from zloss.train.live import LiveView, NoView, quiet_tracker_threads, tracked, tracker_errors
from zloss.train.loss import LossModel, run_loss, run_objective
from zloss.train.metrics import run_metrics
from zloss.train.moe import RouterTerms, router_numbers
from zloss.train.options import RunOptions
from zloss.train.start import (
    Start,
    backward_pass,
    close_accelerator,
    initial_checkpoint,
    make_accelerator,
    make_adamw,
    prepared,
)

LIVE_BLOCKS = 8
"""Validation blocks that `validate_every` reads each time, the first ones: a fraction of the work of one step."""
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
) -> RunMetrics:
    """Train and evaluate. config.json, steps.jsonl, metrics.json and provenance.json are in `folder` afterwards.

    If `folder` holds unfinished work of the same run, training resumes from its last checkpoint, with the same losses as
    in a run that was never interrupted. A folder that another process is using is refused.
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
    """`run_training` on the processes of a job: they share the blocks of every step, and the first one writes and returns.

    The run is the same on any number of processes up to rounding, and may resume on another number of them. If the
    `ending` rule of the first process gives a reason, all of them raise a `RunEndedError`.
    """
    config, options = start.with_block_size(config), options or RunOptions()
    job.together(check_divisible, config, job)
    with run_in_folder(folder, config, start, job) as identity, quiet_tracker_threads():
        began = time.time()
        accelerator = make_accelerator(config, folder, options.trackers, job)
        checkpoint = initial_checkpoint(start, config)
        trainer = _Trainer(config, start.data, job, accelerator, checkpoint, options.validate_every)
        saved = SavedState(folder, identity, job)
        try:
            _take_steps(trainer, saved, folder, options, view if view is not None and job.first else NoView(), ending)
        except RunEndedError:
            close_accelerator(accelerator)
            raise
        # Validate and save.
        records = trainer.recorder.records
        metrics = run_metrics(config, checkpoint, start.data, records, progress or Silent(), job)
        if metrics is not None:
            if options.save_model:
                _save_model(checkpoint, folder)
            write_run_provenance(folder, run_provenance(options.command, began, records))
            write_metrics(folder, metrics)
            saved.clear()
        close_accelerator(accelerator)
        return metrics


def _take_steps(
    trainer: _Trainer,
    saved: SavedState,
    folder: Path,
    options: RunOptions,
    view: LiveView,
    ending: EndingRule | None,
) -> None:
    """Take every step after those of the last checkpoint; log, show, track and checkpoint each of them."""
    config, job, recorder, accelerator = trainer.config, trainer.job, trainer.recorder, trainer.accelerator
    done, recorder.records = job.together(saved.load, accelerator)
    job.together(check_alike, job.all_gather(done), "checkpoints: they need one folder that all of them read")
    trainer.model.train()
    if job.first:
        # Metrics of an earlier run of the same settings: its log is replaced now.
        (folder / METRICS_FILE).unlink(missing_ok=True)

    def reason_to_end() -> str | None:
        return ending(recorder.records) if ending is not None and job.first and recorder.records else None

    def finish(record: StepRecord) -> str | None:
        if log is not None:
            log.append(record)
        shown.show(record, config.tokens_per_step)
        if options.trackers:
            with tracker_errors():
                accelerator.log(tracked(record), step=record.step)
        reason = reason_to_end()
        if reason is None and _is_due(record.step, options.checkpoint_every, config.steps):
            saved.save(accelerator, record.step, recorder.records)
        return reason

    with (
        StepLog(folder, recorder.records) if job.first else nullcontext() as log,
        view.run(config.name, config.steps, done) as shown,
        # The loop seeds the global generators step by step; the caller gets them back as they were.
        torch.random.fork_rng(),
        held_interrupts() as release,
    ):
        # A run that was interrupted in the step that ends it ends there again.
        reason = job.between_steps(reason_to_end, release)
        while reason is None and done < config.steps:
            # A second Ctrl-C may interrupt a step: what is half done is not kept.
            record = trainer.step(done + 1)
            try:
                done = record.step
                reason = job.between_steps(partial(finish, record), release)
            except KeyboardInterrupt:
                if options.checkpoint_every and done > saved.step:
                    saved.save(accelerator, done, recorder.records)
                raise
    if reason is not None:
        raise RunEndedError(done, reason)


def _is_due(step: int, every: int, last: int) -> bool:
    """Whether something that is done every `every` steps, and after the last one, is done after `step`; never for 0."""
    return bool(every) and (step % every == 0 or step == last)


class _Trainer:
    """The model of a run with its loss and optimizer, on its device and in its group, and the recorder of its steps."""

    def __init__(
        self,
        config: TrainConfig,
        data: TrainData,
        job: Job,
        accelerator: Any,
        checkpoint: Checkpoint,
        validate_every: int,
    ) -> None:
        self.config, self.job, self.accelerator = config, job, accelerator
        self._data, self._validate_every = data, validate_every
        objective, plain = run_objective(config), run_loss(config, checkpoint, data)
        self.model, self._optimizer = prepared(accelerator, plain, make_adamw(plain, config), job, config, data)
        self.recorder = Recorder(
            self.model.parameters(),
            self._optimizer,
            clip=config.clip,
            adam_every=config.adam_every,
            group=job.group,
            micro_batches_add_up=True,
        )
        self._window = step_window(objective, deployed=config.head == "paper")
        self._validated = LossModel(checkpoint, objective, config.head, data.valid.counted)

    def step(self, step: int) -> StepRecord:
        """Take step 1, 2, …: forward and backward passes, clipping, the update, and its record."""
        config, began = self.config, time.perf_counter()
        lr = config.lr_at(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        routed = self._add_gradients(step)
        with self.recorder.step(step) as opened:
            opened.lr = lr
            self._window.end_step(opened.norm, config.clip)
            opened.telemetry = step_tails(self._window)
            if config.moe is not None:
                passes = [terms for rank in self.job.all_gather(routed) for terms in rank]
                opened.telemetry |= router_numbers(passes, config.moe, config.tokens_per_step)
            if opened.finite:
                opened.clip_()
                self._optimizer.step()
            else:
                # An update with a nonfinite gradient would make all weights nonfinite: it is counted and skipped.
                opened.skip()
            opened.seconds = time.perf_counter() - began
            if self.job.first and _is_due(step, self._validate_every, config.steps):
                opened.telemetry["valid_ce"] = self._validation_ce()
        self._optimizer.zero_grad()
        return self.recorder.records[-1]

    def _add_gradients(self, step: int) -> list[RouterTerms]:
        """Forward and backward passes of this rank's micro-batches; with experts, the routers' part of each."""
        config, ranks, device = self.config, self.job.ranks, self.accelerator.device
        routed = []
        local = list(micro_batches(config, self._data, step, self.job))
        for batch in local:
            torch.manual_seed(batch.seed)
            inputs, targets = batch.inputs_BT.to(device), batch.targets_BT.to(device)
            with backward_pass(self.model, last=batch is local[-1]):
                out = self.model(inputs, targets, config.tokens_per_step)
                # Each rank has its part of the step's loss, and DDP averages gradients: the average of ranks·part is the sum
                # of the parts.
                self.accelerator.backward(out.loss * ranks)
            self.recorder.micro_batch(*(part * ranks for part in (out.loss, out.cross_entropy, out.auxiliary)))
            self._window.add(micro_batch(out, normalizer=config.tokens_per_step))
            if config.moe is not None:
                routed.append(out.router)
        return routed

    @torch.no_grad()
    def _validation_ce(self) -> float:
        """Cross-entropy of the model as it is on the first validation blocks, in nats per token; changes no number of the run."""
        blocks, batch, device = self._data.valid, self.config.micro_batch, self.accelerator.device
        count, total = min(LIVE_BLOCKS, self._data.valid.count), 0.0
        self._validated.eval()
        try:
            with self.accelerator.autocast():
                for start in range(0, count, batch):
                    stop = min(start + batch, count)
                    inputs, targets = blocks.inputs(start, stop).to(device), blocks.targets(start, stop).to(device)
                    total += float(self._validated(inputs, targets, targets.numel()).cross_entropy) * (stop - start)
        finally:
            self._validated.train()
        return total / count


def _save_model(checkpoint: Checkpoint, folder: Path) -> None:
    model: Any = checkpoint.model
    with whole_folder(folder / "model") as part:
        model.save_pretrained(part)
        checkpoint.tokenizer.save_pretrained(part)
