"""A histogram that finds its own range.

Guarantee: counts are exact integers and any split and merge equals one stream bit for bit. Bins are [i, i+1) · 2^e: they
nest, so doubling their width merges neighbours without error, and e is the smallest exponent at which the range seen
so far spans at most `bins` bins (never finer than 2^-44 of the largest magnitude). The layout is therefore a function
of the smallest and largest value alone, and between half of the bins and all of them are in use.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zloss.streaming.accumulator import Accumulator, State, check_size, int_array
from zloss.streaming.batch import FloatArray
from zloss.streaming.count import Count

FINEST = 44
"""Indices stay below 2^45: integers that fp64 holds exactly."""


def bin_index(x_T: FloatArray, exponent: int) -> NDArray[np.int64]:
    """⌊x / 2^e⌋, exact; a negative x whose quotient underflows still lies in bin −1."""
    x_T = x_T.astype(np.float64, copy=False)
    quotient_T = np.ldexp(x_T, -exponent)
    index_T = np.floor(quotient_T).astype(np.int64)
    index_T[(quotient_T == 0) & (x_T < 0)] = -1
    return index_T


def finest_exponent(low: float, high: float, bins: int) -> int:
    """The smallest e at which [low, high] spans at most `bins` bins of width 2^e."""
    half_span = high / 2 - low / 2
    # 2^e ≤ half_span / bins is certainly too fine, so the search may start there
    too_fine = math.frexp(half_span)[1] - 1 - math.ceil(math.log2(bins)) if half_span else -1074
    largest = max(abs(low), abs(high))
    e = max(too_fine, math.frexp(largest)[1] - 1 - FINEST if largest else -1074, -1074)
    ends = np.array([low, high])
    while np.ptp(bin_index(ends, e)) >= bins:
        e += 1
    return e


class Histogram(Accumulator):
    """Counts in at most `bins` equal bins of a power-of-two width."""

    def __init__(self, bins: int = 512) -> None:
        self.bins = check_size("bins", bins, 2)
        self.counts = Count()
        self._low, self._high = math.inf, -math.inf
        self._exponent = -1074
        self._first = 0
        self._bin_counts = np.zeros(self.bins, dtype=np.int64)

    def update(self, values: Any) -> None:
        """Take `values`; nonfinite ones only count."""
        for x_T in self.counts.admit(values):
            self._cover(float(x_T.min()), float(x_T.max()))
            index_T = bin_index(x_T, self._exponent) - self._first
            self._bin_counts += np.bincount(index_T, minlength=self.bins)

    @property
    def count(self) -> int:
        """Finite values seen."""
        return self.counts.finite

    @property
    def width(self) -> float | None:
        """Width of a bin; None without values."""
        return math.ldexp(1.0, self._exponent) if self.count else None

    def bars(self) -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
        """Edges [n+1] and counts [n] of the bins from the smallest to the largest value; None without values.

        Scaling: counts of values, not densities; divide by `count` and `width` for a density.
        """
        if not self.count:
            return None
        used = int(np.flatnonzero(self._bin_counts)[-1]) + 1
        with np.errstate(over="ignore"):
            edges = np.ldexp(np.arange(self._first, self._first + used + 1, dtype=np.float64), self._exponent)
        # the last edge may be 2^1024, which fp64 does not have
        return np.clip(edges, -sys.float_info.max, sys.float_info.max), self._bin_counts[:used].copy()

    def merge(self, other: Self) -> Self:
        """Add the counts of `other`."""
        self._check_mergeable(other, "bins")
        if other.count:
            exponent, index, counts = other._exponent, other._indices(), other._bin_counts.copy()
            self._cover(other._low, other._high)
            np.add.at(self._bin_counts, self._place(index, exponent)[counts > 0], counts[counts > 0])
        self.counts.merge(other.counts)
        return self

    def _indices(self) -> NDArray[np.int64]:
        return np.arange(self._first, self._first + self.bins, dtype=np.int64)

    def _place(self, index: NDArray[np.int64], exponent: int) -> NDArray[np.int64]:
        """Positions in the present layout of bins of a finer or equal one: ⌊i / 2^(e − e')⌋ − first."""
        return (index >> min(self._exponent - exponent, 62)) - self._first

    def _cover(self, low: float, high: float) -> None:
        """Lay the bins out anew for a range that contains [low, high] and all that came before."""
        low, high = min(low, self._low), max(high, self._high)
        if (low, high) == (self._low, self._high):
            return
        old_exponent, old_index, old_counts = self._exponent, self._indices(), self._bin_counts
        self._low, self._high = low, high
        self._exponent = finest_exponent(low, high, self.bins)
        self._first = int(bin_index(np.array([low]), self._exponent)[0])
        self._bin_counts = np.zeros(self.bins, dtype=np.int64)
        filled = old_counts > 0
        np.add.at(self._bin_counts, self._place(old_index, old_exponent)[filled], old_counts[filled])

    def state_dict(self) -> State:
        return {
            "kind": "Histogram",
            "bins": self.bins,
            "counts": self.counts.to_array(),
            "range": np.array([self._low, self._high]) + 0.0,
            "exponent": self._exponent,
            "first": self._first,
            "bin_counts": self._bin_counts.copy(),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        cls._check_kind(state)
        histogram = cls(int(state["bins"]))
        histogram.counts = Count.from_array(state["counts"])
        histogram._low, histogram._high = (float(x) for x in state["range"])
        histogram._exponent, histogram._first = int(state["exponent"]), int(state["first"])
        histogram._bin_counts = int_array(state["bin_counts"])
        return histogram
