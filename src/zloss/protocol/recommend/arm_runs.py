"""One run of an arm in a folder like those of `zloss train`: made, gone on with, or kept from before.

An arm whose rejection is certain ends early; `stopped.json` in its folder says why, so it is not begun again.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zloss.console.progress import Progress
from zloss.decide.recommend.certain_rejection import certain_rejection
from zloss.decide.thresholds import Thresholds
from zloss.protocol.recommend.crew import Crew
from zloss.ranks.job import Job
from zloss.results.step_record import StepRecord
from zloss.results.train_config import TrainConfig
from zloss.results.writing import write_json
from zloss.train.compare.finished_run import FinishedRun, read_run
from zloss.train.folder.run_folder import claim_folder, is_finished, settle_finished
from zloss.train.folder.saved_state import SavedState
from zloss.train.folder.step_log import read_steps
from zloss.train.run_options import RunOptions
from zloss.train.start.run_start import Start
from zloss.train.step.live import LiveView, Shown

STOPPED_FILE = "stopped.json"


@dataclass(frozen=True)
class StoppedArm:
    """An arm that ended early."""

    step: int
    reason: str


class _ArmStoppedError(Exception):
    """Ends the run of this process alone."""


@dataclass(frozen=True)
class Watch:
    """What happens after every step: the time is recorded, and with a baseline the arm may end."""

    after_step: Callable[[], None]
    baseline: Mapping[str, float | None] | None = None
    """Endpoints of the finished CE run of the same seed; None for a run that is never stopped."""
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True)
class ArmRunner:
    """Everything that the runs of one recommendation share."""

    start: Start
    folder: Path
    options: RunOptions
    view: LiveView
    progress: Progress
    crew: Crew = field(default_factory=Crew)

    def place(self, config: TrainConfig) -> Path:
        """The folder of a run."""
        return self.folder / config.name

    def is_kept(self, config: TrainConfig) -> bool:
        """Whether nothing remains to be done for this run."""
        return is_finished(self.place(config)) or _read_stopped(self.place(config)) is not None

    def run(self, config: TrainConfig, watch: Watch) -> FinishedRun | StoppedArm:
        """The finished run, or why it ended early; a folder with other settings is refused."""
        place, config = self.place(config), self.start.settled(config)
        if is_finished(place):
            settle_finished(place, config, self.start)
            return read_run(place)
        stopped = _read_stopped(place)
        if stopped is not None:
            claim_folder(place, config, self.start)
            return stopped
        alone = self.crew.job.ranks == 1
        view = _WatchedView(self.view, place, config, watch, alone=alone)
        try:
            self.crew.train(config, self.start, place, options=self.options, view=view, progress=self.progress)
        except (_ArmStoppedError, KeyboardInterrupt):
            if view.stopped is None:
                raise
            write_json(place / STOPPED_FILE, {"step": view.stopped.step, "reason": view.stopped.reason})
            SavedState(place, "", Job()).clear()
            return view.stopped
        return read_run(place)


class _WatchedView:
    """The live view of a run; it ends the run where the rule says so."""

    stopped: StoppedArm | None = None

    def __init__(self, inner: LiveView, place: Path, config: TrainConfig, watch: Watch, *, alone: bool) -> None:
        self._inner, self._place, self._config, self._watch, self._alone = inner, place, config, watch, alone

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[Shown]:
        # Steps before an interruption are in the log already, and are not shown again.
        records = read_steps(self._place)[:done] if done else []
        with self._inner.run(name, steps, done) as shown:
            yield _WatchedSteps(shown, records, self._config, self._watch, self._stop)

    def _stop(self, stopped: StoppedArm) -> None:
        self.stopped = stopped
        if self._alone:
            raise _ArmStoppedError(stopped.reason)
        # The other processes are in the same step: Ctrl-C ends it on all of them.
        signal.raise_signal(signal.SIGINT)


class _WatchedSteps:
    def __init__(
        self,
        inner: Shown,
        records: list[StepRecord],
        config: TrainConfig,
        watch: Watch,
        stop: Callable[[StoppedArm], None],
    ) -> None:
        self._inner, self._records, self._config, self._watch, self._stop = inner, records, config, watch, stop

    def show(self, record: StepRecord, tokens: int) -> None:
        self._inner.show(record, tokens)
        self._records.append(record)
        self._watch.after_step()
        if self._watch.baseline is None:
            return
        config = self._config
        reason = certain_rejection(
            self._records,
            self._watch.baseline,
            steps=config.steps,
            spike=config.spike,
            thresholds=self._watch.thresholds,
        )
        if reason is not None:
            self._stop(StoppedArm(record.step, reason))


def _read_stopped(place: Path) -> StoppedArm | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found: Any = json.loads((place / STOPPED_FILE).read_text(encoding="utf-8"))
        return StoppedArm(int(found["step"]), str(found["reason"]))
    return None
