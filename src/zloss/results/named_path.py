"""Names in results: a file or folder by the last part of its path, so that no result tells the folders of a machine.

One rule for the title of a page, report.json, config.json and the recorded command.
"""

from __future__ import annotations

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
