"""Terminal behavior of a long job: progress bars, Ctrl-C between batches, safe output, timings."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, Protocol, TextIO


class Step(Protocol):
    """A running step; `advance` adds to what is done."""

    def advance(self, amount: int) -> None: ...


class Progress(Protocol):
    """A display of steps."""

    def step(self, name: str, total: int | None, unit: str = "tokens") -> AbstractContextManager[Step]: ...


class Silent:
    """Displays nothing."""

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[Any]:
        yield SimpleNamespace(advance=lambda amount: None)


class Terminal:
    """A rich progress bar per step, with rate and time left; it remains as a line when the step is done."""

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[Any]:
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
        # No markup: folder names may contain square brackets.
        label = TextColumn("{task.description:<22}", markup=False)
        if total is None:
            columns: tuple[ProgressColumn, ...] = (SpinnerColumn(), label, TimeElapsedColumn())
        else:
            columns = (SpinnerColumn(), label, BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(printable(name), total=total)
            yield SimpleNamespace(advance=partial(progress.advance, task))
            if total is None:
                progress.update(task, total=1, completed=1)


def choose_progress(quiet: bool) -> Silent | Terminal:
    """Bars if standard error is a terminal and not `quiet`, otherwise nothing."""
    return Silent() if quiet or not sys.stderr.isatty() else Terminal()


def choose_notes(quiet: bool) -> Callable[[str], None]:
    """A function that prints a sentence to standard error, or does nothing if `quiet`."""
    return (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C: the first raises KeyboardInterrupt at the next call of the yielded function, a second one immediately.

    Outside the main thread signals cannot be handled, so nothing is delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    held = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            raise KeyboardInterrupt
        held = True

    def release() -> None:
        if held:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, before)


_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t\r"}
_VISIBLE |= {0x7F: "␡", **dict.fromkeys(range(0x80, 0xA0), "�")}
_COLORS = re.compile(r"(\x1b\[[0-9;]*m)")


def printable(text: str) -> str:
    """`text` with control characters other than line breaks and tabs made visible: ESC as ␛."""
    return text.translate(_VISIBLE)


def _with_colors(text: str) -> str:
    """`printable`, except for the sequences that set colors."""
    return "".join(part if i % 2 else printable(part) for i, part in enumerate(_COLORS.split(text)))


class ClosedPipeError(Exception):
    """The reader of the output has exited. Not a BrokenPipeError, at which rich ends the process with code 1."""


class _Guarded:
    """A text stream that makes control characters visible; colors are kept on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = _with_colors if stream.isatty() else printable

    def write(self, text: str) -> int:
        try:
            return self._stream.write(self._shown(text))
        except BrokenPipeError as error:
            raise ClosedPipeError from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError as error:
            raise ClosedPipeError from error

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded_output() -> Iterator[None]:
    """Guard standard output, and standard error unless it is a terminal, where progress bars move the cursor.

    Characters that the encoding of a stream lacks are printed as escapes, λ as \\u03bb, instead of raising an error.
    """
    with contextlib.ExitStack() as redirected:
        for name, redirect in (("stdout", contextlib.redirect_stdout), ("stderr", contextlib.redirect_stderr)):
            # None: the stream was closed before Python started (`>&-`).
            stream: Any = getattr(sys, name) or redirected.enter_context(open(os.devnull, "w", encoding="utf-8"))
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
            guarded: Any = _Guarded(stream) if name == "stdout" or not stream.isatty() else stream
            redirected.enter_context(redirect(guarded))
        yield


@dataclass
class Clock:
    """Starts when constructed; `with clock("step")` adds to the seconds of that step."""

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - begin

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started
