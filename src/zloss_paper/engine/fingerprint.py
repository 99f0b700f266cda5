"""The identity of a run or an audit: equal fingerprints mean equal numbers.

A fingerprint covers every setting, the texts by content, the weights by the names, sizes and times of their files, and
the version of zloss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zloss
from zloss.errors import CorpusError


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits of the settings, which must be plain JSON values, and of the version of zloss."""
    content = json.dumps([zloss.__version__, settings], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def texts_by_content(texts: Sequence[str]) -> list[str]:
    """The sha256 of every file: a moved text is still the same text."""
    return [file_sha256(Path(text)) for text in texts]


def weights_by_files(model: str) -> str:
    """A folder or file by the names, sizes and times of its files; what is not on this disk by its name."""
    place = Path(model)
    if not place.exists():
        return model
    files = [place] if place.is_file() else sorted(file for file in place.iterdir() if file.is_file())
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)


def file_sha256(text: Path) -> str:
    """The checksum of a text file; an error that names it where it cannot be read."""
    try:
        with text.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorpusError(f"cannot read the text {text}: {error.strerror}.") from error
