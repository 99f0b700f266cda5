"""The cache folder, for files that are expensive to recreate: converted GGUF files."""

from __future__ import annotations

import os
from pathlib import Path

from zloss.errors import OutputError


def cache_root() -> Path:
    """$ZLOSS_CACHE, else zloss/ under the user's cache folder; an `OutputError` for a user without a home."""
    if configured := os.environ.get("ZLOSS_CACHE"):
        return Path(configured)
    if configured := os.environ.get("XDG_CACHE_HOME"):
        return Path(configured) / "zloss"
    try:
        return Path.home() / ".cache" / "zloss"
    except RuntimeError as error:  # neither $HOME nor an entry in the password file
        raise OutputError("no usable cache folder was found: set ZLOSS_CACHE to one.") from error
