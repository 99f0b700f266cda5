"""The processes that work on one recommendation: the first one decides, the others take part in its audit and its runs.

Every decision depends on clocks and files of one process, so only one makes them. The others wait for its next order, do their
share of it, and wait again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.run import run_audit_of
from zloss.console import Progress
from zloss.distributed import Job, LostRankError, StoppedError
from zloss.models.checkpoint import Checkpoint
from zloss.results.audit import AuditReport
from zloss.results.train_config import TrainConfig
from zloss.text import Blocks
from zloss.train.ending import EndingRule, RunEndedError
from zloss.train.run import run_training_of
from zloss.train.run_options import RunOptions
from zloss.train.start.run_start import Start, prepare_start
from zloss.train.step.live import LiveView


@dataclass(frozen=True)
class _Load:
    config: TrainConfig


@dataclass(frozen=True)
class _Audit:
    config: AuditConfig


@dataclass(frozen=True)
class _Train:
    config: TrainConfig
    place: Path
    options: RunOptions
    valid_blocks: int | None


@dataclass(frozen=True)
class _End:
    failed: bool
    interrupted: bool


@dataclass
class Crew:
    """One process of the job, with the model that it has loaded."""

    job: Job = field(default_factory=Job)
    _start: Start | None = None

    def load(self, config: TrainConfig) -> Start:
        """Model and text of the runs, on every process."""
        self._order(_Load(config))
        self._start = self.job.together(prepare_start, config)
        return self._start

    def audit(
        self, config: AuditConfig, checkpoint: Checkpoint | None, *, progress: Progress, command: str
    ) -> AuditReport:
        """The audit of the loaded model, every process with its own blocks."""
        self._order(_Audit(config))
        report = run_audit_of(self.job, config, checkpoint=checkpoint, progress=progress, command=command)
        assert report is not None
        return report

    def train(
        self,
        config: TrainConfig,
        start: Start,
        place: Path,
        *,
        options: RunOptions,
        view: LiveView,
        progress: Progress,
        valid_blocks: int | None = None,
        ending: EndingRule | None = None,
    ) -> None:
        """One run in `place`, every process with its own blocks of a step; `valid_blocks` validates on the first ones only."""
        self._order(_Train(config, place, options, valid_blocks))
        start = _validated_on(start, valid_blocks)
        run_training_of(self.job, config, start, place, options=options, view=view, progress=progress, ending=ending)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """The first process works inside this block; where it leaves it, with an error or without, the others end too."""
        try:
            yield
        except LostRankError:
            raise  # nobody may be left to hear an order
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            self._order(_End(failed=not interrupted, interrupted=interrupted))
            raise
        self._order(_End(failed=False, interrupted=False))

    def follow(self) -> None:
        """Orders until the end; an error that the first process reports ends this one without words."""
        while True:
            order: object = self.job.all_gather(None)[0]
            if isinstance(order, _End):
                if order.interrupted:
                    raise KeyboardInterrupt
                if order.failed:
                    raise StoppedError("another rank has reported an error.")
                return
            # The first process leaves the order in the same way, and decides what follows from it.
            with contextlib.suppress(StoppedError, RunEndedError, KeyboardInterrupt):
                self._obey(order)

    def _obey(self, order: object) -> None:
        if isinstance(order, _Load):
            self._start = self.job.together(prepare_start, order.config)
        elif isinstance(order, _Audit):
            run_audit_of(self.job, order.config, checkpoint=None if self._start is None else self._start.checkpoint)
        elif isinstance(order, _Train):
            assert self._start is not None
            start = _validated_on(self._start, order.valid_blocks)
            run_training_of(self.job, order.config, start, order.place, options=order.options)

    def _order(self, order: object) -> None:
        self.job.all_gather(order)


def _validated_on(start: Start, count: int | None) -> Start:
    """`start` with the first `count` validation blocks; None keeps all."""
    if count is None:
        return start
    blocks = start.data.valid
    kept = min(count, blocks.count)
    first = Blocks(blocks.stream[: kept * blocks.size + 1].clone(), blocks.size, kept, blocks.bos_id, blocks.offset)
    return replace(start, data=replace(start.data, valid=first))
