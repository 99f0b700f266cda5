"""The command line as results record it: what was asked for, without the folders of someone's machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_GIVEN: ContextVar[Sequence[str] | None] = ContextVar("given", default=None)
"""The words that `zloss.cli.main.main` is running; None outside of it."""


@contextmanager
def running(words: Sequence[str]) -> Iterator[None]:
    """Let `command_line()` record these words: those a command was given, which are not always those of the process."""
    token = _GIVEN.set(words)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def command_line(words: Sequence[str] | None = None) -> str:
    """`zloss` and its words, paths by their last part. Without `words`: those of the command that is running."""
    if words is None:
        given = _GIVEN.get()
        words = sys.argv[1:] if given is None else given
    return shlex.join(["zloss", *map(_last_part, words)])


def given_line() -> str:
    """`zloss` and its words as they were given: the line to type once more."""
    given = _GIVEN.get()
    return shlex.join(["zloss", *(sys.argv[1:] if given is None else given)])


def _last_part(word: str) -> str:
    """./NAME for a folder: a bare name would be read as an id on the hub, and so is `owner/name` that is no path here."""
    path = Path(word)
    try:
        if "/" not in word or not (word.startswith(("/", ".", "~")) or path.exists()):
            return word
        return f"./{path.name}" if path.is_dir() else path.name
    except OSError:  # a name that no file can have, or a folder that may not be entered
        return path.name
