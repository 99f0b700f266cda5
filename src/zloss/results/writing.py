"""Files appear whole or not at all: written beside their place, then renamed onto it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from zloss.errors import OutputError


def write_bytes(path: Path, content: bytes) -> None:
    """Put `content` at `path` atomically; an earlier file stays untouched unless the new one is complete."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a result has the permissions of any other file of the user.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise OutputError(f"cannot write {path}: {error.strerror or error}. Choose another folder.") from error


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
