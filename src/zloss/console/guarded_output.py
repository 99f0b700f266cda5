"""Output in which text from outside cannot act on the terminal.

Names in results, files and arguments may hold escape sequences that move the cursor, clear the screen or set its title. The
tables of zloss use one kind of sequence only, colours and weights (SGR), so all others are made visible.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t\r"}
_VISIBLE |= {0x7F: "␡", **dict.fromkeys(range(0x80, 0xA0), "�")}
_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


def printable(text: str) -> str:
    """`text` with every control character but line breaks and tabs made visible: ESC as ␛."""
    return text.translate(_VISIBLE)


def _with_colours(text: str) -> str:
    """`printable`, but for the sequences that set colours."""
    return "".join(part if i % 2 else printable(part) for i, part in enumerate(_COLOURS.split(text)))


class _Guarded:
    """A text stream that makes control characters visible; on a terminal colours stay."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = _with_colours if stream.isatty() else printable

    def write(self, text: str) -> int:
        return self._stream.write(self._shown(text))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Inside, standard output is guarded, and standard error too unless it is a terminal, where progress bars need the cursor.

    Characters that the encoding of a stream lacks are printed as escapes, λ as \\u03bb, and are no error after the work.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    guarded: Any = _Guarded(sys.stdout)
    with contextlib.ExitStack() as redirected:
        redirected.enter_context(contextlib.redirect_stdout(guarded))
        if not sys.stderr.isatty():
            also: Any = _Guarded(sys.stderr)
            redirected.enter_context(contextlib.redirect_stderr(also))
        yield
