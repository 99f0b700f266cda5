"""The saved state of an unfinished pass, from which an audit goes on after the last finished block."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from zloss.errors import InputError
from zloss.results.writing import write_bytes
from zloss.streaming.accumulator import State

STATE_FILE = "audit-state.npz"
SAVE_EVERY_SECONDS = 15.0
"""Seconds between two saves, so a killed audit loses no more work; $ZLOSS_SAVE_EVERY sets another number."""


class SavedPass:
    """The file with the accumulators, the number of finished blocks, and the fingerprint of the pass.

    The fingerprint tells the settings of the audit, its tokens, and the layout of the accumulators.
    """

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        self._path = None if folder is None else folder / STATE_FILE
        self._fingerprint = fingerprint
        self._interval = float(os.environ.get("ZLOSS_SAVE_EVERY", SAVE_EVERY_SECONDS))
        self._saved_at = time.monotonic()

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """(finished blocks, accumulator state), None where there is nothing to resume."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            with np.load(self._path, allow_pickle=False) as archive:
                state = dict(archive)
            fingerprint, finished = str(state.pop("fingerprint")), int(state.pop("finished_blocks"))
        except Exception as error:
            raise InputError(f"{self._path} cannot be read ({error}): delete it, or turn `resume` off.") from error
        if fingerprint != self._fingerprint:
            raise InputError(
                f"{self._path} belongs to another audit (its model, text, blocks or options differ, "
                "or another version of zloss wrote it): use the same options, or turn `resume` off."
            )
        return finished, state

    def save(self, finished_blocks: int, state: Callable[[], State], *, now: bool = False) -> None:
        """Write the state if the last save is older than the interval, or if `now`."""
        if self._path is None or (not now and time.monotonic() - self._saved_at < self._interval):
            return
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {"fingerprint": self._fingerprint, "finished_blocks": finished_blocks, **state()}
        np.savez(buffer, **arrays)
        write_bytes(self._path, buffer.getvalue())
        self._saved_at = time.monotonic()

    def clear(self) -> None:
        """Delete the file, because the pass is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
