"""Faults at a chosen write: the process is killed, or the disk is full from that point on.

Python reports to audit hooks what it is about to do. Opening a file to write, renaming, making and removing count as writes,
under the watched folder only.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAKES = ("open", "os.rename", "os.mkdir", "os.link", "os.symlink", "os.truncate")
_EVENTS = (*_MAKES, "os.remove", "os.rmdir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def count_writes(folder: Path, into: Path) -> Callable[[], None]:
    """Count the writes under `folder`; their number is the size of the file `into`."""
    handle = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    return _hook(folder, lambda number, event: os.write(handle, b"."))


def kill_at_write(folder: Path, wanted: int) -> Callable[[], None]:
    """Kill the process in front of write number `wanted`, from 1."""

    def act(number: int, event: str) -> None:
        if number == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    return _hook(folder, act)


def full_from_write(folder: Path, wanted: int, error: int = errno.ENOSPC) -> Callable[[], None]:
    """From write number `wanted` on everything that makes or fills a file fails; removing still works."""

    def act(number: int, event: str) -> None:
        if number >= wanted and event in _MAKES:
            raise OSError(error, os.strerror(error))

    return _hook(folder, act)


def _hook(folder: Path, act: Callable[[int, str], Any]) -> Callable[[], None]:
    prefix, seen = os.fsencode(os.path.realpath(folder)), [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS or not _concerns(event, arguments, prefix):
            return
        seen[0] += 1
        act(seen[0], event)

    return lambda: sys.addaudithook(hook)


def _concerns(event: str, arguments: tuple[Any, ...], prefix: bytes) -> bool:
    path = arguments[0]
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    if event == "open" and not (len(arguments) > 2 and isinstance(arguments[2], int) and arguments[2] & _WRITING):
        return False
    return os.path.realpath(os.fsencode(path)).startswith(prefix)
