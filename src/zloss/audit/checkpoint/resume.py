"""The saved state of an unfinished pass, from which an audit goes on after the last finished block."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zloss.errors import InputError
from zloss.ranks.job import Job
from zloss.results.writing import write_bytes
from zloss.streaming.accumulator import State
from zloss.streaming.over_ranks import from_bytes, to_bytes

STATE_FILE = "audit-state.npz"
SAVE_EVERY_SECONDS = 15.0
"""Seconds between two saves, so a killed audit loses no more work; $ZLOSS_SAVE_EVERY sets another number."""


class SavedPass:
    """The file with the accumulators, the number of finished blocks, and the fingerprints of the pass and of the model.

    The fingerprint of the pass depends on the settings of the audit, its tokens, and the layout of the accumulators. That of
    the model takes seconds, so it is taken only where a state is read or written.
    """

    def __init__(
        self, folder: Path | None, fingerprint: str, model: Callable[[], str], *, job: Job | None = None
    ) -> None:
        name = STATE_FILE
        if job is not None and job.ranks > 1:
            # The blocks of a rank depend on the number of ranks, so a state of another number is none of ours.
            name = f"audit-state-{job.rank}-of-{job.ranks}.npz"
        self._path = None if folder is None else folder / name
        self._fingerprint = fingerprint
        self._model = functools.cache(model)
        self._interval = _interval()
        self._saved_at = time.monotonic()

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """(finished blocks, accumulator state), None where there is nothing to resume."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            state = from_bytes(self._path.read_bytes())
            fingerprint, finished = str(state.pop("fingerprint")), int(state.pop("finished_blocks"))
            model = str(state.pop("model", "unknown"))
        except Exception as error:
            raise InputError(f"{self._path} cannot be read ({error}): delete it, or turn `resume` off.") from error
        if fingerprint != self._fingerprint:
            raise InputError(
                f"{self._path} belongs to another audit (its model, text, blocks or options differ, "
                "or another version of zloss wrote it): use the same options, or turn `resume` off."
            )
        if model != self._model():
            raise InputError(
                f"{self._path} belongs to another model: its weights or its config differ from those of the model now. "
                "Use the model with which the audit began, or turn `resume` off."
            )
        return finished, state

    def save(self, finished_blocks: int, state: Callable[[], State], *, now: bool = False) -> None:
        """Write the state if the last save is older than the interval, or if `now`."""
        if self._path is None or (not now and time.monotonic() - self._saved_at < self._interval):
            return
        head = {"fingerprint": self._fingerprint, "model": self._model(), "finished_blocks": finished_blocks}
        write_bytes(self._path, to_bytes({**head, **state()}))
        self._saved_at = time.monotonic()

    def clear(self) -> None:
        """Delete the file, because the pass is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _interval() -> float:
    """Seconds between two saves, as the environment sets them."""
    given = os.environ.get("ZLOSS_SAVE_EVERY", str(SAVE_EVERY_SECONDS))
    try:
        return float(given)
    except ValueError as error:
        raise InputError(f"ZLOSS_SAVE_EVERY is expected to be a number of seconds, but is {given!r}.") from error
