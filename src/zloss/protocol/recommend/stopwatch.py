"""Time spent on one recommendation, over all commands that worked on it; time between them does not count."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from zloss.results.writing import write_json

FILE = ".spent.json"
EVERY = 15.0
"""Seconds between two records of the time; a killed command loses at most these."""


class Stopwatch:
    """Seconds since the first start in a folder."""

    def __init__(self, folder: Path) -> None:
        self._file, self._began, self._saved = folder / FILE, time.monotonic(), time.monotonic()
        self._before = 0.0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._before = float(json.loads(self._file.read_text(encoding="utf-8"))["seconds"])

    @property
    def seconds(self) -> float:
        """What was spent in all."""
        return self._before + time.monotonic() - self._began

    def tick(self) -> None:
        """Record the time if the last record is old."""
        if time.monotonic() - self._saved > EVERY:
            self.save()

    def save(self) -> None:
        """Record the time."""
        self._saved = time.monotonic()
        write_json(self._file, {"seconds": self.seconds})
