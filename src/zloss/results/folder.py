"""The folder that results are written to."""

from __future__ import annotations

import tempfile
from pathlib import Path

from zloss.errors import OutputError, UnwritableFolderError


def check_folder(folder: Path) -> None:
    """An error, before the work starts, where results could not be written to `folder`."""
    try:
        existing = folder
        while not _stands(existing):
            existing = existing.parent
        if not existing.is_dir():
            raise UnwritableFolderError(
                f"cannot write to {folder}: {existing} is not a writable folder. Choose another folder."
            )
        # A new file under a name that nobody knows before, so that it cannot be a link that somebody put there.
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".zloss-") as probe:
            probe.write(b"0")
            probe.flush()
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise UnwritableFolderError(
            f"cannot write to {folder}: {error.strerror or error}. Choose another folder."
        ) from error


def _stands(path: Path) -> bool:
    """Whether there is something at `path`; an error where the system refuses to say, as for a name that is too long."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
