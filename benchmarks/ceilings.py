"""Figures with their limits, printed the same way everywhere and recorded for `all.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from interleaved import Timing

RECORD = "ZLOSS_BENCHMARK_RECORD"
"""Environment variable: the file to which every figure is appended as a line of JSON."""


@dataclass(frozen=True)
class Figure:
    """One number of a benchmark; smaller is better."""

    name: str
    value: float
    ceiling: float
    noise: float = 0.0
    """Relative difference between the same figure taken from odd and from even rounds."""
    unit: str = ""
    """Empty for a ratio."""

    @property
    def met(self) -> bool:
        return self.value <= self.ceiling

    @property
    def within_noise(self) -> bool:
        return self.value <= self.ceiling * (1 + self.noise)


def ratio(name: str, timing: Timing, reference: Timing, ceiling: float) -> Figure:
    """The best time over that of a reference of the same rounds."""
    halves = [min(timing.seconds[i::2]) / min(reference.seconds[i::2]) for i in (0, 1) if timing.seconds[i::2]]
    noise = max(halves) / min(halves) - 1 if len(halves) == 2 else 0.0
    return Figure(name, timing.best / reference.best, ceiling, noise)


def print_figures(figures: Iterable[Figure]) -> bool:
    """Print each figure next to its ceiling, record it if `all.py` asks for it; return whether all ceilings are met."""
    met = True
    for figure in figures:
        unit = f" {figure.unit}" if figure.unit else ""
        verdict = "met" if figure.met else "MISSED"
        noise = f", noise {100 * figure.noise:.1f} %" if figure.noise else ""
        print(
            f"{figure.name:<64} {figure.value:8.3f}{unit}   (limit {figure.ceiling:.4g}{unit}: {verdict}{noise})",
            flush=True,
        )
        met = met and figure.met
        if record := os.environ.get(RECORD):
            with open(record, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(figure)) + "\n")
    return met
