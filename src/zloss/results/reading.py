"""The one reader of JSON: strict, and every way in which a file can be damaged is one sentence.

Python's own parser takes NaN and Infinity, makes an infinity of 1e999, and fails on deep nesting with a `RecursionError`.
No file of zloss has any of them, so here all of them are errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zloss.errors import InputError

_DIGITS = 309
"""Digits of the largest float."""


def parse_json(text: str) -> Any:
    """The value of a JSON text; a `ValueError` that says what is wrong with it."""
    try:
        return json.loads(text, parse_float=_number, parse_int=_whole_number, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(file: Path, *, advice: str) -> Any:
    """The JSON value in `file`; `advice` closes the sentence of the error ("run the command again")."""
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror or error}): {advice}.") from error
    except ValueError as error:
        raise InputError(
            f"{file} cannot be read, because it is not JSON ({error}): it may be cut off; {advice}."
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
    if len(text) > _DIGITS:
        raise ValueError(f"{text[:40]}… is beyond the range of a float")
    return int(text)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")
