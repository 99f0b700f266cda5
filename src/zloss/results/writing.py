"""Files appear whole or not at all: written beside their place, then renamed onto it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from zloss.errors import UnwritableFolderError, first_line
from zloss.results.system_lock import take_lock
from zloss.results.unfinished import SUFFIX, part_prefix, remove_abandoned

_WRITE_FAILED = re.compile(r"os error \d+|No space left|File too large|PytorchStreamWriter|inline_container")


def write_bytes(path: Path, content: bytes) -> None:
    """Put `content` at `path` atomically; an earlier file stays untouched unless the new one is complete."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=part_prefix(path.name), suffix=SUFFIX)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            take_lock(handle)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            # mkstemp makes private files; a result has the permissions of any other file of the user.
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
            temporary.replace(path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        if isinstance(error, OSError):
            raise UnwritableFolderError(
                f"cannot write {path}: {error.strerror or error}. Choose another folder."
            ) from error
        raise


def why_not_written(error: BaseException) -> str | None:
    """The reason where somebody's error says that a write failed; None where it is about something else.

    Libraries written in Rust and C++ have errors of their own for a full disk.
    """
    if isinstance(error, OSError):
        return error.strerror or first_line(error)
    foreign = type(error).__module__.startswith("safetensors") or _WRITE_FAILED.search(str(error))
    return first_line(error) if foreign else None


def write_text(path: Path, text: str) -> None:
    """`write_bytes` for text, UTF-8."""
    # A tokenizer that decodes half a character gives lone surrogates, which UTF-8 cannot encode.
    write_bytes(path, text.encode("utf-8", errors="replace"))


def result_file(out: str | Path, name: str) -> Path:
    """`out` itself where it names a .json file, else the file `name` in the folder `out`."""
    path = Path(out)
    return path if path.suffix == ".json" else path / name


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Strict JSON: NaN and infinity are refused, not written."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1)
    write_text(path, _compact_number_lists(text) + "\n")


def _compact_number_lists(text: str) -> str:
    """Lists of plain numbers on one line: a figure's columns would otherwise be most of the file's lines.

    Only lists that `json.dumps` broke over lines match, so text values, whose newlines are escaped, stay as they are.
    """
    return re.sub(r"\[\n\s*([-+0-9.eE,\s]+?)\n\s*\]", lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", text)
