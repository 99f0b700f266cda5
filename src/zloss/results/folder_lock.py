"""One process at a time writes into a folder of results.

The lock is the system's own (flock) on a small file in the folder, so it ends with the process that holds it: after a crash or
a kill nothing has to be cleaned up. Where the system has no such locks, or the file system gives none, nothing is locked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from zloss.errors import InputError, OutputError, UnwritableFolderError
from zloss.results.system_lock import take_lock

LOCK_FILE = ".zloss-lock"
"""Holds the process id of its holder; removed at the end of an orderly one."""

_ATTEMPTS = 1000
"""How often the folder is made again where other processes remove it, empty, at the same moment."""


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold `folder` inside the block; an error that names the holder where another process has it.

    The folder is made where there is none, and removed again where the block leaves nothing in it.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        handle = _locked(folder)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise UnwritableFolderError(
            f"cannot write to {folder}: {error.strerror or error}. Choose another folder."
        ) from error
    try:
        yield
    finally:
        # Before the release, and only our own file: the block may have replaced the folder, which another process may hold.
        with contextlib.suppress(OSError):
            if _is_at(folder / LOCK_FILE, handle):
                (folder / LOCK_FILE).unlink()
        os.close(handle)
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def _locked(folder: Path) -> int:
    """The handle of the folder's lock file, held by this process."""
    while True:
        handle = _opened(folder / LOCK_FILE)
        try:
            if not take_lock(handle):
                raise InputError(
                    f"{folder} is in use by {_holder(handle)}: wait for it to end, or choose another folder."
                )
            if _is_at(folder / LOCK_FILE, handle):
                os.ftruncate(handle, 0)
                os.write(handle, f"{os.getpid()}\n".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder has removed it in between: take the new one


def _opened(file: Path) -> int:
    """A handle of the lock file; folder and file are made where there are none."""
    # Not through a link: the file is written to.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    attempts = 0
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            return os.open(file, flags, 0o666)
        except (FileNotFoundError, FileExistsError):
            # Its last holder removed the folder: before the file was opened, or before mkdir could see that what exists is one.
            attempts += 1
            if attempts == _ATTEMPTS:
                raise


def _is_at(file: Path, handle: int) -> bool:
    """Whether the open file is the one that stands at its path."""
    try:
        there, here = file.stat(), os.fstat(handle)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _holder(handle: int) -> str:
    text = os.pread(handle, 32, 0).decode("ascii", errors="replace").strip()
    return f"another process of zloss (pid {text})" if text.isdecimal() else "another process of zloss"
