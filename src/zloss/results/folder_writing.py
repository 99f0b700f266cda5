"""Folders appear whole or not at all: filled beside their place, then renamed onto it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zloss.errors import UnwritableFolderError, ZlossError
from zloss.results.system_lock import take_lock
from zloss.results.unfinished import SUFFIX, part_prefix, remove_abandoned
from zloss.results.writing import why_not_written


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """An empty folder to fill; when the block ends it is synced and stands at `target`, in place of an earlier one.

    When the block raises, it is removed and `target` stays as it was; a failed write, also one of safetensors, tokenizers
    or torch, is an `OutputError`. Folders that killed processes left half filled are removed first.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=part_prefix(target.name), suffix=SUFFIX))
        handle = os.open(scratch, os.O_RDONLY)
    except OSError as error:
        raise UnwritableFolderError(
            f"cannot write {target}: {error.strerror or error}. Choose another folder."
        ) from error
    try:
        take_lock(handle)
        yield scratch
        _sync_and_share(scratch)
        _move(scratch, target)
    except ZlossError:
        raise
    except Exception as error:
        reason = why_not_written(error)
        if reason is None:
            raise
        raise UnwritableFolderError(f"cannot write {target}: {reason}. Choose another folder.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(handle)


def _sync_and_share(folder: Path) -> None:
    """Every file on the disk, with the permissions of any file of the user: mkdtemp and safetensors make theirs private."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        if path.is_file():
            with path.open("rb") as content:
                os.fsync(content.fileno())


def _move(scratch: Path, target: Path) -> None:
    """Rename; an earlier folder is moved aside first, because a folder cannot be renamed onto a filled one."""
    if not target.exists():
        scratch.rename(target)
        return
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=part_prefix(target.name), suffix=SUFFIX))
    try:
        target.rename(aside / target.name)
        try:
            scratch.rename(target)
        except OSError:
            (aside / target.name).rename(target)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
