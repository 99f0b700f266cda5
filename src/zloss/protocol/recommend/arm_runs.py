"""One run of an arm in a folder like those of `zloss train`: made, gone on with, or kept from before.

An arm whose rejection is certain ends early; `stopped.json` in its folder says why, so it is not begun again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from zloss.console import Progress
from zloss.decide.recommend.certain_rejection import certain_rejection
from zloss.decide.thresholds import Thresholds
from zloss.distributed import Job
from zloss.protocol.recommend.crew import Crew
from zloss.results.step_record import StepRecord
from zloss.results.train_config import TrainConfig
from zloss.results.writing import write_json
from zloss.train.compare.finished_run import FinishedRun, read_run
from zloss.train.ending import RunEndedError
from zloss.train.folder.run_folder import claim_folder, is_finished, settle_finished
from zloss.train.folder.saved_state import SavedState
from zloss.train.run_options import RunOptions
from zloss.train.start.run_start import Start
from zloss.train.step.live import LiveView

STOPPED_FILE = "stopped.json"


@dataclass(frozen=True)
class StoppedArm:
    """An arm that ended early."""

    step: int
    reason: str


@dataclass(frozen=True)
class Watch:
    """What happens after every step: the time is recorded, and with a baseline the arm may end."""

    after_step: Callable[[], None]
    baseline: Mapping[str, float | None] | None = None
    """Endpoints of the finished CE run of the same seed; None for a run that is never stopped."""
    thresholds: Thresholds = field(default_factory=Thresholds)

    def after(self, config: TrainConfig, records: Sequence[StepRecord]) -> str | None:
        """Records the time of the last step; why the rejection of the run is certain after these, or None."""
        self.after_step()
        if self.baseline is None:
            return None
        return certain_rejection(
            records, self.baseline, steps=config.steps, spike=config.spike, thresholds=self.thresholds
        )


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
        try:
            self.crew.train(
                config,
                self.start,
                place,
                options=self.options,
                view=self.view,
                progress=self.progress,
                ending=partial(watch.after, config),
            )
        except RunEndedError as ended:
            write_json(place / STOPPED_FILE, {"step": ended.step, "reason": ended.reason})
            SavedState(place, "", Job()).clear()
            return StoppedArm(ended.step, ended.reason)
        return read_run(place)


def _read_stopped(place: Path) -> StoppedArm | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found: Any = json.loads((place / STOPPED_FILE).read_text(encoding="utf-8"))
        return StoppedArm(int(found["step"]), str(found["reason"]))
    return None
