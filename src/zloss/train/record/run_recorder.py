"""The recorder of another loop's run: the folder of a run of `zloss train`, without `zloss train`.

    with zloss.record_run("runs", model, objective, seed=1, validation=rows, optimizer=optimizer, clip=1.0) as run:
        for batch in batches:
            out = zloss.head_loss(hidden_of(batch), model.head.weight, batch.target, objective)
            out.loss.backward()
            run.micro_batch(out)
            with run.step() as step:
                step.clip_()
                optimizer.step()
            optimizer.zero_grad()

`runs/<method>-<λ>-s<seed>/` then holds config.json, steps.jsonl, metrics.json and provenance.json, and `zloss compare runs`
judges the methods. The validation blocks are measured once, at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from zloss.console import Progress, Silent
from zloss.distributed import first_rank, world_size
from zloss.errors import InputError
from zloss.objectives import Objective
from zloss.optimizer.adam import StatefulOptimizer
from zloss.optimizer.recorder import OpenStep, Recorder
from zloss.results.folder_lock import locked_folder
from zloss.results.provenance import write_run_provenance
from zloss.results.recorded_run import RecordedRun
from zloss.results.run_config import CONFIG_FILE
from zloss.results.run_metrics import METRICS_FILE, RunMetrics, write_metrics
from zloss.results.step_record import StepRecord
from zloss.results.writing import write_json
from zloss.telemetry.window import HasLossParts, MicroBatch, StepWindow, micro_batch
from zloss.text import Blocks
from zloss.train.folder.provenance import run_provenance
from zloss.train.folder.run_folder import earlier_settings, refuse_differing
from zloss.train.folder.step_log import STEPS_FILE, StepLog, read_steps
from zloss.train.record.recorded_config import RecordOptions
from zloss.train.record.recorded_model import RecordedModel
from zloss.train.step.telemetry import step_tails

TOKENS = "tokens"
"""Key of a step's telemetry: predicted tokens of the step, on all ranks."""


class RunRecorder:
    """One run being recorded; `record_run` makes it.

    On several processes every one of them calls it; the first one writes. Used as a context manager, it measures the
    validation blocks when the block ends without an error. Without one, call `start` first and `finish` last.
    """

    def __init__(
        self,
        folder: Path,
        config: RecordedRun,
        model: RecordedModel,
        objective: Objective,
        blocks: Blocks,
        optimizer: StatefulOptimizer | None,
        options: RecordOptions,
    ) -> None:
        self.folder, self.config = folder, config
        self.metrics: RunMetrics | None = None
        """metrics.json, once the run is finished."""
        self._model, self._objective, self._blocks, self._options = model, objective, blocks, options
        self._optimizer, self._steps_done = optimizer, 0
        self._writes = first_rank()
        self._recorder = Recorder(())
        self._window = StepWindow(1, objective.coordinate, across_ranks=True)
        self._parts: list[MicroBatch] = []
        self._open: OpenStep | None = None
        self._log: StepLog | None = None
        self._held = ExitStack()
        self._began = self._clock = 0.0

    @property
    def records(self) -> list[StepRecord]:
        """The steps so far."""
        return self._recorder.records

    def start(self, step: int = 0, optimizer: StatefulOptimizer | None = None) -> None:
        """Hold the folder and write config.json. `step`: the last step of the checkpoint that the loop goes on from;
        `optimizer`: where there was none yet when the recorder was made."""
        self._began, self._clock, self._steps_done = time.time(), time.perf_counter(), step
        self._optimizer = self._optimizer if optimizer is None else optimizer
        self._model.refuse_shards()
        self._recorder = Recorder(
            self._model.module.parameters(),
            self._optimizer,
            clip=self.config.clip,
            adam_every=self._options.adam_every if self._optimizer is not None else None,
        )
        if not self._writes:
            return
        self._held.enter_context(locked_folder(self.folder))
        try:
            self._claim()
            self._recorder.records = self._earlier(step)
            (self.folder / METRICS_FILE).unlink(missing_ok=True)
            self._log = self._held.enter_context(StepLog(self.folder, self._recorder.records))
        except BaseException:
            self.close()
            raise

    def _claim(self) -> None:
        mine, before = json.loads(json.dumps(self.config.to_dict())), earlier_settings(self.folder)
        if before is not None:
            refuse_differing(self.folder, [key for key in {**before, **mine} if before.get(key) != mine.get(key)])
        write_json(self.folder / CONFIG_FILE, mine)

    def _earlier(self, step: int) -> list[StepRecord]:
        """The records of the steps before, which a resumed run keeps."""
        if not step:
            return []
        known = read_steps(self.folder) if (self.folder / STEPS_FILE).is_file() else []
        if [record.step for record in known[:step]] != list(range(1, step + 1)):
            raise InputError(
                f"the loop goes on after step {step}, but {self.folder / STEPS_FILE} does not hold the steps before: "
                "record from the first step on, in the same folder."
            )
        return known[:step]

    def micro_batch(self, output: HasLossParts | MicroBatch, *, normalizer: float | Tensor | None = None) -> None:
        """One loss that backward was or will be called on, an output of `head_loss`; a step may have several.

        `normalizer`: the one that `head_loss` was given; None for the mean over valid tokens. A handle of `apply` calls it
        by itself: `handle.observers.append(run.micro_batch)`.
        """
        part = output if isinstance(output, MicroBatch) else micro_batch(output, "mean", normalizer)
        self._parts.append(part)
        self._window.add(part)

    @contextmanager
    def step(self) -> Iterator[OpenStep]:
        """Enter after the last backward pass of a step, leave after the optimizer's step."""
        opened = self.begin_step()
        yield opened
        self.end_step()

    @torch.no_grad()
    def begin_step(self, *, clipped_by: float | None = None) -> OpenStep:
        """Read the gradients; `clipped_by` is the factor by which the loop has clipped them already, None if it has not."""
        if not self._parts:
            raise InputError("a step without a loss: call `micro_batch` with every output of `head_loss` first.")
        if self._log is None and self._writes:
            raise InputError("the recorder is not started: use it as a context manager, or call `start` first.")
        sums_N3 = torch.stack(
            [
                torch.stack([part.cross_entropy.double(), part.auxiliary.double(), part.stats.valid.sum().double()])
                for part in self._parts
            ]
        )
        if world_size() > 1:
            dist.all_reduce(sums_N3)
        tokens = sums_N3[:, 2].sum().clamp_min(1)
        for ce, auxiliary, _ in sums_N3 / tokens:
            self._recorder.micro_batch(ce + auxiliary, ce, auxiliary)
        self._parts = []
        self._open = self._recorder.begin(self._steps_done + 1, clipped_by=clipped_by)
        self._window.end_step(self._open.norm, self.config.clip)
        self._open.telemetry = step_tails(self._window) | {TOKENS: float(tokens)}
        if self._optimizer is not None and self._optimizer.param_groups:
            self._open.lr = float(self._optimizer.param_groups[0]["lr"])
        return self._open

    def end_step(self, *, updated: bool = True) -> StepRecord:
        """Complete the record of the step, after the optimizer's step."""
        opened, self._open = self._open, None
        if opened is None:
            raise InputError("`end_step` without `begin_step`.")
        if not updated:
            opened.skip()
        now = time.perf_counter()
        opened.seconds, self._clock = now - self._clock, now
        record = self._recorder.end(opened)
        self._steps_done += 1
        if self._log is not None:
            self._log.append(record)
        return record

    def finish(self, progress: Progress | None = None) -> RunMetrics | None:
        """Measure the validation blocks and write metrics.json; None on a process that does not write."""
        try:
            if self._writes:
                self.metrics = self._measure(progress or Silent())
                command = f"zloss.record_run ({self.config.loop})"
                write_run_provenance(self.folder, run_provenance(command, self._began, self.records))
                write_metrics(self.folder, self.metrics)
        finally:
            self.close()
        return self.metrics

    def _measure(self, progress: Progress) -> RunMetrics:
        # The measurement is the heavier half of these imports, and `import zloss` has to stay light.
        from zloss.measure.measurement import measurement_of
        from zloss.train.folder.measured_run import (
            MeasuredRun,
            assembled_metrics,
            no_gradients,
            run_gradients,
            validate,
        )

        config, options, blocks = self.config, self._options, self._blocks
        if not self.records:
            raise InputError("a run without a step has no metrics: record at least one step.")
        run = MeasuredRun(
            method=config.method,
            coef=config.coef,
            seed=config.seed,
            objective=self._objective,
            clip=config.clip,
            tokens_consumed=int(sum(record.telemetry.get(TOKENS) or 0.0 for record in self.records)),
            tokens_available=options.tokens_available,
            diag_coef=options.diag_coef,
            gradient_blocks=options.gradient_blocks,
            thresholds=options.thresholds,
            spike=options.spike,
            adam_every=options.adam_every,
        )
        measurement = measurement_of(self._model.head(), coef=options.diag_coef, gain_beta=config.gain_beta)
        with self._model.states() as hidden_of:
            validated = validate(measurement, blocks, hidden_of, progress)
        checkpoint = self._model.checkpoint
        if checkpoint is None:
            gradients = no_gradients("the gradients are taken of models of transformers only")
        else:
            with self._model.evaluating():
                gradients = run_gradients(run, checkpoint, measurement, blocks)
        return assembled_metrics(run, measurement, validated, self.records, gradients)

    def close(self) -> None:
        """Let go of the folder; a run without metrics counts as unfinished."""
        self._log = None
        self._held.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.finish()
        else:
            self.close()
