"""A run while it trains: lines on the terminal, and scalars for trackers."""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from zloss.errors import MissingDependencyError, OutputError, UnknownNameError
from zloss.results.io import why_not_written
from zloss.results.steps import StepRecord
from zloss.telemetry.trackers import require_tracker

WINDOW = 100
"""Number of most recent steps that p99 ‖g‖₂ covers."""
REFRESH = 4
"""Redraws per second."""
BAR = 24
"""Columns of a bar."""
DEFAULT_TRACKER = "tensorboard"
SCALARS = ("loss", "cross_entropy", "auxiliary", "grad_norm", "grad_inf", "param_norm", "lr")
"""Numbers of a step record that trackers get, in addition to its telemetry."""


class LiveView(Protocol):
    """What shows runs, one at a time."""

    def run(self, name: str, steps: int, done: int) -> AbstractContextManager[object]:
        """Show the run `name` of `steps` steps, of which `done` were taken earlier."""
        ...

    def show(self, record: StepRecord, tokens: int) -> None:
        """Show a finished step of that run, of `tokens` tokens."""
        ...


class NoView:
    """Shows nothing."""

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[None]:
        yield

    def show(self, record: StepRecord, tokens: int) -> None:
        pass


def choose_view(quiet: bool) -> LiveView:
    """Lines on a terminal; nothing with `quiet`, or where stderr is not a terminal."""
    return NoView() if quiet or not sys.stderr.isatty() else TerminalView()


class TerminalView:
    """A bar and a line of numbers per run, which stay on the terminal when the run is done; a bar for a series of runs."""

    def __init__(self) -> None:
        self._number, self._runs, self._steps_after = 1, 1, 0

    def place(self, number: int, runs: int, steps_after: int) -> None:
        """The next run is the `number`-th of a series, and the runs that follow it have `steps_after` steps."""
        self._number, self._runs, self._steps_after = number, runs, steps_after

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[None]:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column
        from rich.text import Text

        console = Console(stderr=True)
        # A long name is cut first, because the step and the time left are what changes.
        title = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        count = TextColumn("step {task.completed} of {task.total}")
        self._bars = Progress(title, BarColumn(BAR), count, TimeRemainingColumn(), console=console, expand=True)
        shown_name = f"run {self._number} of {self._runs}  {name}" if self._runs > 1 else name
        self._bars.add_task(shown_name, total=steps, completed=done)
        if self._number < self._runs:
            self._bars.add_task("this and all later runs", total=steps + self._steps_after, completed=done)
        self._numbers = Text(no_wrap=True, overflow="ellipsis")
        self._valid_ce: float | None = None
        self._norms: deque[float] = deque(maxlen=WINDOW)
        with Live(Group(self._bars, self._numbers), console=console, refresh_per_second=REFRESH):
            yield

    def show(self, record: StepRecord, tokens: int) -> None:
        self._norms.append(record.grad_norm)
        if (found := record.telemetry.get("valid_ce")) is not None:
            self._valid_ce = found
        for task in self._bars.task_ids:
            self._bars.update(task, completed=record.step)
        self._numbers.plain = numbers_line(record, tokens, self._norms, self._valid_ce)


def numbers_line(record: StepRecord, tokens: int, norms: Sequence[float], valid_ce: float | None) -> str:
    """Loss, latest validation CE, speed, p99.9 |log Z − c| and p99 ‖g‖₂ after a step; `norms` are those of the last steps."""
    violation = record.telemetry.get("p_z_999")
    finite = [norm for norm in norms if math.isfinite(norm)]
    parts = [f"  loss {record.loss:.4f}"]
    if valid_ce is not None:
        parts.append(f"valid CE {valid_ce:.4f}")
    if record.seconds:
        parts.append(f"{tokens / record.seconds:,.0f} tok/s")
    if violation is not None:
        parts.append(f"P_Z {violation:.3g}")
    if finite:
        parts.append(f"p99 ‖g‖ {np.quantile(finite, 0.99):.3g}")
    return "  ".join(parts)


def usable_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """The named trackers without `none`; the default one is silently left out if it is not installed."""
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    except ImportError as error:
        raise MissingDependencyError("accelerate", "Training", "train") from error
    known = {str(kind): kind for kind in LOGGER_TYPE_TO_CLASS}
    wanted = [name for name in names if name != "none"]
    for name in wanted:
        if name not in known:
            raise UnknownNameError("tracker", name, [*known, "none"])
    if tuple(names) == (DEFAULT_TRACKER,) and importlib.util.find_spec("tensorboard") is None:
        wanted.remove(DEFAULT_TRACKER)
    for name in wanted:
        require_tracker(name)  # accelerate silently leaves out what is not installed
    return tuple(wanted)


def tracked(record: StepRecord) -> dict[str, float]:
    """The scalars of a step for a tracker; what is not finite is left out."""
    values: dict[str, float | None] = {name: getattr(record, name) for name in SCALARS} | record.telemetry
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


@contextmanager
def tracker_errors() -> Iterator[None]:
    """Turn a tracker's failed write into an `OutputError` that names the option to switch the tracker off."""
    try:
        yield
    except Exception as error:
        reason = why_not_written(error)
        if reason is None or isinstance(error, OutputError):
            raise
        raise OutputError(
            f"a tracker cannot write its log: {reason}. Free some space and run the same command again, or set `trackers` to "
            "none."
        ) from error


@contextmanager
def quiet_tracker_threads() -> Iterator[None]:
    """No traceback from a thread whose write fails inside the block: TensorBoard raises the same error at its next call."""
    before = threading.excepthook

    def hook(raised: Any) -> None:
        if not isinstance(raised.exc_value, OSError):
            before(raised)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
