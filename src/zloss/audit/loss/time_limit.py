"""A limit on how long foreign code may take, so that a loss that hangs ends in one sentence."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from zloss.errors import InputError

TIME_LIMIT = 300.0
"""Seconds that one call of an audited loss may take unless told otherwise."""


class LossTimeoutError(InputError):
    """The audited loss did not come back in time. No other size is tried after it."""


class _TimeIsUp(BaseException):
    """Not an `Exception`: code that catches those must not catch this one."""


@contextlib.contextmanager
def limited(seconds: float | None, name: str) -> Iterator[None]:
    """An error where the block takes longer than `seconds`; None is no limit.

    The system's timer interrupts Python code, sleeping and waiting for locks. It needs the main thread; in other threads, and
    where the system has no such timer, nothing is limited.
    """
    if not seconds or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TimeIsUp:
        raise LossTimeoutError(
            f"{name} did not come back within {seconds:g} seconds: it hangs, or needs a larger `time_limit` (0: none)."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
