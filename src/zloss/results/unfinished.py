"""Parts of writes that have not ended: how they are named, held, and removed once their process is gone.

A part is written beside its place under a name with the id of its process, and that process holds a lock of the system on it.
The lock ends with the process. So a part whose lock is free and whose process is gone was abandoned: the next write in the
same folder removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

from zloss.results.system_lock import take_lock

SUFFIX = ".part"
_NAME = re.compile(r"\..*\.zloss-(\d+)-\w+\.part")
_OLD = 3600.0
"""Seconds after which a part with a free lock is abandoned even where its process id is in use, by another process."""


def part_prefix(name: str) -> str:
    """How the name of a part of `name` begins: shorter than 255 bytes, however long `name` is."""
    return f".{name[:40]}.zloss-{os.getpid()}-"


def remove_abandoned(folder: Path) -> None:
    """Remove the parts in `folder` whose processes are gone; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            match = _NAME.fullmatch(entry.name)
            if match is not None and _is_abandoned(Path(entry.path), int(match[1])):
                _remove(Path(entry.path))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_abandoned(path: Path, process: int) -> bool:
    try:
        if _is_running(process) and time.time() - path.stat().st_mtime < _OLD:
            return False
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        return take_lock(handle)
    finally:
        os.close(handle)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it belongs to another user
        return True
    return True
