"""Read JSON strictly, and write files atomically.

Python's own parser accepts NaN and Infinity, turns 1e999 into an infinity, and fails on deep nesting with a `RecursionError`.
No file of zloss has any of them, so here all of them are errors. A file is written next to its place under a name with the id
of its process, which holds a system lock on it, then renamed. A part whose lock is free and whose process is gone was
abandoned: the next write in the same folder removes it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from zloss.errors import InputError, OutputError, UnwritableFolderError, first_line

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""Errors of a file system without locks; EBADF is that of NFS for a folder, whose handle cannot write."""


def take_lock(handle: int) -> bool:
    """Whether this process now holds the lock on an open file or folder; True as well on a file system without locks."""
    try:
        return lock_descriptor(handle, blocking=False)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return True


SUFFIX = ".part"
_NAME = re.compile(r"\..*\.zloss-(\d+)-\w+\.part")
_OLD = 3600.0
"""Seconds after which a part with a free lock counts as abandoned even if its process id is in use by another process."""


def part_prefix(name: str) -> str:
    """How the name of a part of `name` begins: shorter than 255 bytes, however long `name` is."""
    return f".{name[:40]}.zloss-{os.getpid()}-"


def remove_abandoned(folder: Path) -> None:
    """Remove the parts in `folder` whose processes are gone; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        for path in map(Path, os.scandir(folder)):
            match = _NAME.fullmatch(path.name)
            if match is None or not _is_abandoned(path, int(match[1])):
                continue
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
        pass
    return True


_WRITE_FAILED = re.compile(r"os error \d+|No space left|File too large|PytorchStreamWriter|inline_container")


@contextlib.contextmanager
def unwritable(what: str) -> Iterator[None]:
    """Turn an error of the system inside the block into one sentence that says what could not be written."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise UnwritableFolderError(
            f"cannot write {what}: {error.strerror or error}. Choose another folder."
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Put `content` at `path` atomically; an earlier file stays untouched unless the new one is complete."""
    temporary: Path | None = None
    try:
        with unwritable(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(path.parent)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=part_prefix(path.name), suffix=SUFFIX)
            temporary = Path(name)
            with os.fdopen(handle, "wb") as file:
                take_lock(handle)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                share(temporary)
                temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            if temporary is not None:
                temporary.unlink()
        raise


def share(path: Path) -> None:
    """Give `path` the permissions of any other file or folder of the user: mkstemp and mkdtemp make private ones."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def why_not_written(error: BaseException) -> str | None:
    """The reason if an error of another library says that a write failed; None if it is about something else.

    Libraries written in Rust and C++ raise their own errors when the disk is full.
    """
    if isinstance(error, OSError):
        return error.strerror or first_line(error)
    foreign = type(error).__module__.startswith("safetensors") or _WRITE_FAILED.search(str(error))
    return first_line(error) if foreign else None


def write_text(path: Path, text: str) -> None:
    """`write_bytes` for text, UTF-8."""
    # A tokenizer that decodes half a character gives lone surrogates, which UTF-8 cannot encode.
    write_bytes(path, text.encode("utf-8", errors="replace"))


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Strict JSON: NaN and infinity are rejected, not written."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1)
    # Lists of plain numbers on one line: a figure's columns would otherwise be most of the file's lines. Only lists that
    # `json.dumps` broke over lines match, so text values, whose newlines are escaped, stay as they are.
    numbers = r"\[\n\s*([-+0-9.eE,\s]+?)\n\s*\]"
    write_text(path, re.sub(numbers, lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", text) + "\n")


def parse_json(text: str) -> Any:
    """The value of a JSON text; a `ValueError` that says what is wrong with it."""
    try:
        return json.loads(text, parse_float=_number, parse_int=_whole_number, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(file: Path, *, advice: str) -> Any:
    """The JSON value in `file`; `advice` ends the error message ("run the command again")."""
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror or error}): {advice}.") from error
    except ValueError as error:
        raise InputError(
            f"{file} cannot be read, because it is not JSON ({error}): it may be truncated; {advice}."
        ) from error


def read_object(file: Path, *, advice: str) -> dict[str, Any]:
    """The JSON object in `file`."""
    data = read_json(file, advice=advice)
    if not isinstance(data, dict):
        raise InputError(f"{file} is expected to hold an object, but holds a {type(data).__name__}: {advice}.")
    return data


def json_lines(text: str) -> Iterator[str]:
    """The lines of a JSON Lines text.

    Only line feeds end them: a string may hold U+2028, U+0085 and others at which `str.splitlines` breaks.
    """
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return (line.removesuffix("\r") for line in lines)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the range of a float")
    return value


def _whole_number(text: str) -> int:
    _number(text)  # rejects one that no float can hold
    return int(text)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
