"""The folder that results are written to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from zloss.errors import OutputError


def check_folder(folder: Path) -> None:
    """An error, before the work starts, where results could not be written to `folder`."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OutputError(f"cannot write to {folder}: {existing} is not a writable folder. Choose another folder.")
    probe = existing / f".zloss-{os.getpid()}"
    try:
        probe.write_bytes(b"0")
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror}. Choose another folder.") from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
