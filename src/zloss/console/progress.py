"""Progress of long steps: a bar with tokens/s and time left on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from zloss.console.guarded_output import printable


class Step(Protocol):
    """One running step; `advance` counts what has been done."""

    def advance(self, amount: int) -> None: ...


class Progress(Protocol):
    """A display of steps."""

    def step(self, name: str, total: int | None, unit: str = "tokens") -> AbstractContextManager[Step]: ...


class _SilentStep:
    def advance(self, amount: int) -> None:
        pass


class Silent:
    """Shows nothing."""

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[Step]:
        yield _SilentStep()


class _Bar:
    def __init__(self, progress: object, task: object) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: int) -> None:
        self._progress.advance(self._task, amount)  # type: ignore[attr-defined]


class Terminal:
    """A rich progress bar per step, with rate and time left; the bar stays as a line when the step is done."""

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[Step]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            SpinnerColumn,
            Task,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        class Rate(ProgressColumn):
            def render(self, task: Task) -> Text:
                speed = task.finished_speed or task.speed
                return Text(f"{speed:,.0f} {unit}/s" if speed else "")

        console = Console(stderr=True)
        # No markup: the name of a folder may hold square brackets.
        label = TextColumn("{task.description:<22}", markup=False)
        if total is None:
            columns: tuple[ProgressColumn, ...] = (SpinnerColumn(), label, TimeElapsedColumn())
        else:
            columns = (SpinnerColumn(), label, BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(printable(name), total=total)
            yield _Bar(progress, task)
            if total is None:
                progress.update(task, total=1, completed=1)


def choose_progress(quiet: bool) -> Silent | Terminal:
    """Bars on a terminal, unless `quiet`; elsewhere nothing."""
    return Silent() if quiet or not sys.stderr.isatty() else Terminal()
