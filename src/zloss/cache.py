"""Where things that are costly to make again are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """$ZLOSS_CACHE, else zloss/ under the user's cache folder."""
    if configured := os.environ.get("ZLOSS_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zloss"
