"""A compiled library as a file: its checksum stands behind its content, and only an own, whole file is loaded.

A library that is cut off ends the process with SIGBUS when it is loaded, and one that somebody else put there runs with the
rights of the user. So a file is loaded only where its checksum fits, and where nobody but the user (or root) can have written it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
import tempfile
from pathlib import Path

_MARK = b"zloss-sha256:"
_SEAL_BYTES = len(_MARK) + hashlib.sha256().digest_size
"""Length of the seal, a mark and a checksum. It follows the content; loaders ignore what follows an ELF file."""
_OTHERS_CAN_WRITE = stat.S_IWGRP | stat.S_IWOTH


def store_library(file: Path, content: bytes) -> bool:
    """Put the sealed content at `file`: written beside its place, synced, renamed. False where it cannot be kept safely."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _only_ours(file.parent.lstat()):
            return False
        # mkstemp gives the file to the user alone, whatever the umask.
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".building-")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as temporary:
            temporary.write(content + _seal(content))
            temporary.flush()
            os.fsync(temporary.fileno())
        Path(name).replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        return False
    return True


def load_library(file: Path) -> ctypes.CDLL | None:
    """The library of `store_library`; None where there is none, where it is damaged, or where others could have written it."""
    with contextlib.ExitStack() as opened:
        try:
            folder = _open(file.parent, os.O_DIRECTORY, None, opened)
            content = _open(file.name, 0, folder, opened)
        except OSError:
            return None
        status = os.fstat(content)
        if not stat.S_ISREG(status.st_mode) or not _only_ours(status) or not _only_ours(os.fstat(folder)):
            return None
        with os.fdopen(os.dup(content), "rb") as stream:
            if not _is_whole(stream.read()):
                return None
        # Through the handle of the folder that was checked, whatever now stands at its path.
        return ctypes.CDLL(f"/proc/self/fd/{folder}/{file.name}")


def _open(path: Path | str, flag: int, folder: int | None, opened: contextlib.ExitStack) -> int:
    """A handle of `path`, which is no link, closed with `opened`."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flag, dir_fd=folder)
    opened.callback(os.close, handle)
    return handle


def _only_ours(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user or root, and nobody else may write to it."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_CAN_WRITE


def _is_whole(data: bytes) -> bool:
    content, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    return len(content) > 0 and seal == _seal(content)


def _seal(content: bytes) -> bytes:
    return _MARK + hashlib.sha256(content).digest()
