"""Timing by interleaved repetition: every contender once per round, minima and spread over the rounds.

Single timings swing by a factor of two when anything else runs, and drift with temperature; ratios of minima taken in
the same rounds do not. A reference row tells whether the machine was quiet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender over all rounds."""

    best: float
    worst: float

    @property
    def spread(self) -> float:
        return self.worst / self.best


def measure(contenders: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Timing]:
    """Each contender once per round, after one unmeasured round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if round_index:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(min(values), max(values)) for name, values in seconds.items()}


def measure_quietly(
    contenders: Mapping[str, Callable[[], object]],
    *,
    reference: str,
    rounds: int,
    limit: float = 1.3,
    attempts: int = 3,
) -> dict[str, Timing]:
    """Repeat until max/min of the reference row stays under `limit`; say so when it does not."""
    for attempt in range(1, attempts + 1):
        timings = measure(contenders, rounds=rounds)
        spread = timings[reference].spread
        if spread <= limit:
            return timings
        what = "repeating" if attempt < attempts else "the ratios below are of a machine that was not quiet"
        print(
            f"not quiet: max/min of {reference!r} is {spread:.2f} > {limit} (attempt {attempt} of {attempts}); {what}"
        )
    return timings
