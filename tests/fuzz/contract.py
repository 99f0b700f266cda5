"""the contract of the command line under hostile input: a documented exit code, one sentence, no traceback."""

from __future__ import annotations

import contextlib
import io
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zloss.cli.main import main

CODES = (0, 1, 2, 130)
_LASTING: list[tempfile.TemporaryDirectory[str]] = []


class BrokenContractError(AssertionError):
    """A command broke the contract; the message has what is needed to reproduce it."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    output: str
    error: str


def run_command(words: Sequence[str], *, codes: Sequence[int] = CODES) -> Ended:
    """Run a command in this process; an exception, another code or a long error is a `BrokenContractError`."""
    output, error = _utf8_stream(), _utf8_stream()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            code = main(list(words))
        except SystemExit as left:  # how the parser exits
            code = left.code if isinstance(left.code, int) else 2
        except BaseException as raised:
            if isinstance(raised, KeyboardInterrupt):
                raise
            raise BrokenContractError(f"{list(words)} raised\n{traceback.format_exc()}") from raised
    said, complaint = _content(output), _content(error)
    if code not in codes:
        raise BrokenContractError(f"{list(words)} ended with {code}, not one of {list(codes)}:\n{complaint}")
    if code == 2 and not complaint.strip():
        raise BrokenContractError(f"{list(words)} ended with 2 and said nothing.")
    if "Traceback (most recent call last)" in said + complaint:
        raise BrokenContractError(f"{list(words)} printed a traceback:\n{said}{complaint}")
    if "\x1b" in said + complaint:
        raise BrokenContractError(f"{list(words)} let an escape byte through:\n{said!r}{complaint!r}")
    return Ended(code, said, complaint)


def lasting_folder(name: str) -> Path:
    """A temporary folder that lasts until the process exits."""
    _LASTING.append(tempfile.TemporaryDirectory(prefix=f"zloss-fuzz-{name}-"))
    return Path(_LASTING[-1].name)


def _utf8_stream() -> io.TextIOWrapper:
    """A stream that encodes as a terminal does: what cannot be encoded is an error there too."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _content(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8")
