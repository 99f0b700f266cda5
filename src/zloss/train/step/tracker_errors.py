"""Trackers that cannot write: their errors as one sentence."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from zloss.errors import OutputError
from zloss.results.writing import why_not_written


@contextlib.contextmanager
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


@contextlib.contextmanager
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
