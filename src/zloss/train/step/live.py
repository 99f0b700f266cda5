"""The live view of runs on the terminal: a bar per run with loss, tokens/s, time left, P_Z and the gradient tail."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from zloss.results.step_record import StepRecord

WINDOW = 100
"""Steps over which the p99 of ‖g‖₂ on the bar is taken, the last ones."""


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


class _Nothing:
    def show(self, record: StepRecord, tokens: int) -> None:
        pass


class NoView:
    """Shows nothing."""

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[Shown]:
        yield _Nothing()


class _Bar:
    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def show(self, record: StepRecord, tokens: int) -> None:
        self._norms.append(record.grad_norm)
        self._progress.update(self._task, advance=1, text=step_text(record, tokens, self._norms))


class TerminalView:
    """A bar of rich per run, which stays on the terminal when the run is done."""

    @contextmanager
    def run(self, name: str, steps: int, done: int) -> Iterator[Shown]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description:<24}", markup=False),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            yield _Bar(progress, progress.add_task(name, total=steps, completed=done, text=""))


def step_text(record: StepRecord, tokens: int, norms: deque[float]) -> str:
    """Loss and tokens/s of a step, its P_Z where it has one, and p99 ‖g‖₂ over `norms`, the last steps."""
    rate = f"{tokens / record.seconds:,.0f} tok/s" if record.seconds else ""
    violation = record.telemetry.get("p_z_999")
    shown = "" if violation is None else f"P_Z {violation:.3g}"
    finite = [norm for norm in norms if np.isfinite(norm)]
    tail = f"p99 ‖g‖ {np.quantile(finite, 0.99):.3g}" if finite else ""
    return "  ".join(part for part in (f"loss {record.loss:.4f}", rate, shown, tail) if part)


def choose_view(quiet: bool) -> NoView | TerminalView:
    """Bars on a terminal; nothing with `quiet`, or where stderr is not a terminal."""
    return NoView() if quiet or not sys.stderr.isatty() else TerminalView()
