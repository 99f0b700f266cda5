"""What a run costs here: a few steps of CE in a folder that is removed again."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from zloss.console import Progress, Silent, Step
from zloss.protocol.recommend.crew import Crew
from zloss.results.train_config import TrainConfig
from zloss.train.folder.step_log import read_steps
from zloss.train.run_options import RunOptions
from zloss.train.start.run_start import Start
from zloss.train.step.live import NoView, Shown

STEPS, VALID_BLOCKS = 4, 4
FOLDER = ".probe"
LEAST_INTERVAL = 60.0
"""Seconds of training between two checkpoints, at least; ten times what writing one takes where that is more."""


@dataclass(frozen=True)
class RunCost:
    """Seconds of the parts of a run."""

    step: float
    """One optimizer step."""
    checkpoint: float
    """Writing one checkpoint."""
    valid_block: float
    """Validating one block."""
    rest: float
    """The copy of the model and the gradients of the trained one."""

    def checkpoint_every(self, steps: int) -> int:
        """Steps between two checkpoints."""
        interval = max(LEAST_INTERVAL, 10 * self.checkpoint)
        return min(steps, max(1, math.ceil(interval / max(self.step, 1e-9))))

    def beside_steps(self, steps: int, valid_blocks: int) -> float:
        """Everything of a run but its steps."""
        written = math.ceil(steps / self.checkpoint_every(steps))
        return self.rest + written * self.checkpoint + valid_blocks * self.valid_block


def probe_cost(config: TrainConfig, start: Start, folder: Path, progress: Progress, crew: Crew) -> RunCost:
    """The cost of a run with these settings, measured on four steps and four validation blocks."""
    place = folder / FOLDER
    shutil.rmtree(place, ignore_errors=True)
    clock, view = _Timed(), _TimedView()
    probe = replace(config, steps=STEPS, warmup=0)
    began = time.perf_counter()
    try:
        with progress.step("timing a few steps", None):
            options = RunOptions(checkpoint_every=STEPS)
            crew.train(probe, start, place, options=options, view=view, progress=clock, valid_blocks=VALID_BLOCKS)
        seconds = [record.seconds or 0.0 for record in read_steps(place)]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    whole = time.perf_counter() - began
    blocks = min(VALID_BLOCKS, start.data.valid.count)
    return RunCost(
        step=statistics.median(seconds[1:]),
        checkpoint=max(0.0, view.seconds - sum(seconds)),
        valid_block=clock.seconds / blocks,
        rest=max(0.0, whole - view.seconds - clock.seconds),
    )


class _Timed(Silent):
    """Seconds of the validation."""

    seconds = 0.0

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[Step]:
        began = time.perf_counter()
        with super().step(name, total, unit) as shown:
            yield shown
        if name == "validation":
            self.seconds += time.perf_counter() - began


class _TimedView(NoView):
    """Seconds of the training loop, checkpoints included."""

    seconds = 0.0

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[Shown]:
        began = time.perf_counter()
        with super().run(name, steps, done) as shown:
            yield shown
        self.seconds = time.perf_counter() - began
