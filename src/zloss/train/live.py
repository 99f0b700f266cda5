"""What a run shows while it trains: two lines on the terminal, and scalars for trackers."""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from zloss.errors import MissingDependencyError, OutputError, UnknownNameError
from zloss.results.io import why_not_written
from zloss.results.steps import StepRecord
from zloss.telemetry.trackers import require_tracker

WINDOW = 100
"""Steps over which p99 ‖g‖₂ and the time of a step are taken, the last ones."""
REFRESH = 4
"""Redraws per second."""
BAR = 24
"""Columns of a bar at most."""
DEFAULT_TRACKER = "tensorboard"
SCALARS = ("loss", "cross_entropy", "auxiliary", "grad_norm", "grad_inf", "param_norm", "lr")
"""Numbers of a step record that trackers get, in addition to its telemetry."""


class Shown(Protocol):
    """One run that is being shown."""

    def show(self, record: StepRecord, tokens: int) -> None:
        """Show a finished step of `tokens` tokens."""
        ...


class LiveView(Protocol):
    """What shows runs, one at a time."""

    def run(self, name: str, steps: int, done: int) -> AbstractContextManager[Shown]:
        """Show the run `name` of `steps` steps, of which `done` were taken earlier."""
        ...


class NoView:
    """Shows nothing."""

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[Shown]:
        yield self

    def show(self, record: StepRecord, tokens: int) -> None:
        pass


@dataclass(frozen=True)
class Position:
    """The place of a run in a series of runs."""

    number: int = 1
    """From 1."""
    runs: int = 1
    steps_after: int = 0
    """Steps of the runs that follow it."""


@dataclass
class RunProgress:
    """The state of a run that trains."""

    name: str
    steps: int
    done: int
    position: Position = field(default_factory=Position)
    clock: Callable[[], float] = time.monotonic
    record: StepRecord | None = None
    tokens: int = 0
    valid_ce: float | None = None
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    moments: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    """When the last steps ended."""

    def __post_init__(self) -> None:
        self.moments.append(self.clock())

    def show(self, record: StepRecord, tokens: int) -> None:
        """Take a finished step."""
        self.record, self.tokens, self.done = record, tokens, record.step
        self.norms.append(record.grad_norm)
        self.moments.append(self.clock())
        if (found := record.telemetry.get("valid_ce")) is not None:
            self.valid_ce = found

    def left(self, steps: int) -> float | None:
        """Seconds that `steps` more steps take at the pace of the last ones; None before the first."""
        if len(self.moments) < 2:
            return None
        return steps * (self.moments[-1] - self.moments[0]) / (len(self.moments) - 1)


def choose_view(quiet: bool) -> NoView | TerminalView:
    """Two lines on a terminal; nothing with `quiet`, or where stderr is not a terminal."""
    return NoView() if quiet or not sys.stderr.isatty() else TerminalView()


class TerminalView:
    """Two lines per run, which stay on the terminal when the run is done."""

    def __init__(self) -> None:
        self._position = Position()

    def place(self, position: Position) -> None:
        """Set the place of the next run in its series."""
        self._position = position

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[Shown]:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(stderr=True)
        progress = RunProgress(name, steps, done, self._position)

        def drawn() -> Text:
            return Text("\n".join(progress_lines(progress, console.width)))

        with Live(get_renderable=drawn, console=console, refresh_per_second=REFRESH):
            yield progress


def progress_lines(progress: RunProgress, width: int) -> list[str]:
    """Two lines of at most `width` columns: the place of the run with its time left, and the numbers of its last step."""
    position, remaining = progress.position, progress.steps - progress.done
    first = f"run {position.number} of {position.runs}  {progress.name}" if position.runs > 1 else progress.name
    last = f"step {progress.done} of {progress.steps}  {duration(progress.left(remaining))} left"
    if position.runs > position.number:
        last += f", {duration(progress.left(remaining + position.steps_after))} for all"
    room = min(width - len(first) - len(last) - 4, BAR)
    if room >= 4:
        full = round(room * progress.done / progress.steps) if progress.steps else room
        place = f"{first}  {'━' * full}{'─' * (room - full)}  {last}"
    else:
        # A long name gives way: the step and the time left are what changes.
        place = f"{first[: max(width - len(last) - 2, 0)]}  {last}"[:width]
    record = progress.record
    if record is None:
        return [place, ""]
    violation = record.telemetry.get("p_z_999")
    finite = [norm for norm in progress.norms if math.isfinite(norm)]
    parts = [f"  loss {record.loss:.4f}"]
    if progress.valid_ce is not None:
        parts.append(f"valid CE {progress.valid_ce:.4f}")
    if record.seconds:
        parts.append(f"{progress.tokens / record.seconds:,.0f} tok/s")
    if violation is not None:
        parts.append(f"P_Z {violation:.3g}")
    if finite:
        parts.append(f"p99 ‖g‖ {np.quantile(finite, 0.99):.3g}")
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return [place, "  ".join(parts)[:width]]


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds.

    >>> duration(42), duration(725), duration(7384), duration(None)
    ('0:42', '12:05', '2:03:04', '-:--')
    """
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
    """A failed write of a tracker is an `OutputError` that names the option to leave it out."""
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
    """Inside, a thread that ends with a failed write prints no traceback: TensorBoard raises the same error at the next call."""
    before = threading.excepthook

    def hook(raised: Any) -> None:
        if not isinstance(raised.exc_value, OSError):
            before(raised)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
