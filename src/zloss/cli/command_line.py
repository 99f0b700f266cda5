"""The command line as results record it: what was asked for, without the folders of someone's machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def command_line(words: Sequence[str] | None = None) -> str:
    """`zloss` and its words, paths by their last part."""
    return shlex.join(["zloss", *(_last_part(word) for word in (sys.argv[1:] if words is None else words))])


def _last_part(word: str) -> str:
    """./NAME for a folder: a bare name would be read as an id on the hub, and so is `owner/name` that is no path here."""
    path = Path(word)
    if "/" not in word or not (word.startswith(("/", ".", "~")) or path.exists()):
        return word
    return f"./{path.name}" if path.is_dir() else path.name
