"""Timing by interleaved repetition: every contender once per round, minima and spread over the rounds.

Single timings swing by a factor of two when anything else runs, and drift with temperature; ratios of minima taken in
the same rounds do not. A reference row tells whether the machine was quiet.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Progress = Callable[[str], None]
"""Receives one line after every timed call."""


def to_stderr(line: str) -> None:
    """Progress that leaves standard output to the table."""
    print(line, file=sys.stderr, flush=True)


def silent(line: str) -> None:
    """No progress."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender, round by round."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        return max(self.seconds) / self.best


def measure(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, progress: Progress = silent
) -> dict[str, Timing]:
    """Each contender once per round, after one unmeasured round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            took = time.perf_counter() - start
            progress(f"{f'round {round_index} of {rounds}' if round_index else 'warm-up'}: {name}: {1e3 * took:.0f} ms")
            if round_index:
                seconds[name].append(took)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def measure_quietly(
    contenders: Mapping[str, Callable[[], object]],
    *,
    reference: str,
    rounds: int,
    limit: float = 1.3,
    attempts: int = 3,
    progress: Progress = silent,
) -> dict[str, Timing]:
    """Repeat until max/min of the reference row stays under `limit`; say so when it does not."""
    for attempt in range(1, attempts + 1):
        timings = measure(contenders, rounds=rounds, progress=progress)
        spread = timings[reference].spread
        if spread <= limit:
            return timings
        what = "repeating" if attempt < attempts else "the ratios below are of a machine that was not quiet"
        print(
            f"not quiet: max/min of {reference!r} is {spread:.2f} > {limit} (attempt {attempt} of {attempts}); {what}"
        )
    return timings
