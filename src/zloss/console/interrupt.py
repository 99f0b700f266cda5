"""Ctrl-C that takes effect between batches: a batch is counted whole or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Inside, the first Ctrl-C raises KeyboardInterrupt at the next call of the yielded function; a second one raises it at once.

    Outside the main thread signals cannot be handled, and nothing is held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    held = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            raise KeyboardInterrupt
        held = True

    def release() -> None:
        if held:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, before)
