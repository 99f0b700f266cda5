"""A file of JSON as an object, or one sentence that says why it is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zloss.errors import InputError


def read_object(file: Path, *, advice: str) -> dict[str, Any]:
    """The JSON object in `file`; `advice` closes the sentence of the error ("run the command again")."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}): {advice}.") from error
    if not isinstance(data, dict):
        raise InputError(f"{file} is expected to hold an object, but holds a {type(data).__name__}: {advice}.")
    return data
