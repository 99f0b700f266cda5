"""Names in results: a file or folder by the last part of its path, so that no result tells the folders of a machine.

One rule for the title of a page, report.json, config.json and the recorded command.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def without_folders(name: str) -> str:
    """The last part of a path that exists here; what is none, such as `owner/name` on the hub, stays.

    >>> without_folders("owner/name"), without_folders("/")
    ('owner/name', '/')
    """
    try:
        return Path(name).resolve().name or name if name and Path(name).exists() else name
    except OSError:  # a name that no file can have
        return name


def recorded_command(argv: Sequence[str]) -> str:
    """The command line `zloss` + `argv` as results record it: paths by their last part, folders as ./NAME."""
    return shlex.join(["zloss", *map(_last_part, argv)])


def _last_part(argument: str) -> str:
    # ./NAME for a folder: a bare NAME would be read as an id on the hub. `owner/name` that is not a path here stays.
    path = Path(argument)
    try:
        if "/" not in argument or not (argument.startswith(("/", ".", "~")) or path.exists()):
            return argument
        return f"./{path.name}" if path.is_dir() else path.name
    except OSError:  # a name that no file can have, or a folder that may not be entered
        return path.name
