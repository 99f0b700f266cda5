"""Count, mean, variance, minimum and maximum of a stream.

Guarantee: count, minimum and maximum are exact; mean and variance equal those of one stream to fp64 rounding under any
split and merge, and a constant stream has exactly its value as mean and exactly 0 as variance. Magnitudes below about
1e150 keep their squares inside fp64; past it the variance is inf, while the mean stays right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from zloss.streaming.accumulator import Accumulator, State
from zloss.streaming.batch import FloatArray
from zloss.streaming.count import Count


@dataclass(frozen=True)
class Sums:
    """The mergeable core: n, the mean, and M2 = Σ (x − mean)²."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0


def sums_of(x_T: FloatArray) -> Sums:
    """The sums of one nonempty batch, by two passes in fp64."""
    low, high = float(x_T.min()), float(x_T.max())
    if low == high:  # Σx / n of equal numbers may miss their value by an ulp
        return Sums(x_T.size, low, 0.0)
    x_T = x_T.astype(np.float64, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = stable_mean(x_T)
        d_T = x_T - mean
        # the second term takes out what rounding of the mean left in d
        m2 = float(np.dot(d_T, d_T) - d_T.sum() ** 2 / d_T.size)
    return Sums(x_T.size, mean, max(m2, 0.0) if math.isfinite(m2) else math.inf)


def stable_mean(x_T: FloatArray) -> float:
    """Σ x / n, with the division first where the sum would overflow."""
    total = float(x_T.sum(dtype=np.float64))
    return total / x_T.size if math.isfinite(total) else float((x_T / x_T.size).sum())


def combine(a: Sums, b: Sums) -> Sums:
    """Chan's update: mean = mean_a + δ n_b/n, M2 = M2_a + M2_b + δ² n_a n_b/n with δ = mean_b − mean_a."""
    if a.count == 0 or b.count == 0:
        return b if a.count == 0 else a
    n = a.count + b.count
    delta = b.mean - a.mean
    if math.isinf(delta):
        return Sums(n, a.mean * (a.count / n) + b.mean * (b.count / n), math.inf)
    return Sums(n, a.mean + delta * (b.count / n), a.m2 + b.m2 + delta * (a.count / n * b.count) * delta)


class Moments(Accumulator):
    """Streaming count, mean, variance, minimum and maximum; None where there are no values."""

    def __init__(self) -> None:
        self.counts = Count()
        self._sums = Sums()
        self._low, self._high = math.inf, -math.inf

    def update(self, values: Any) -> None:
        """Take `values`; nonfinite ones only count."""
        for x_T in self.counts.admit(values):
            self._sums = combine(self._sums, sums_of(x_T))
            self._low = min(self._low, float(x_T.min()))
            self._high = max(self._high, float(x_T.max()))

    @property
    def count(self) -> int:
        """Finite values seen."""
        return self._sums.count

    @property
    def mean(self) -> float | None:
        """Mean of the finite values, kept inside [minimum, maximum]; None without values."""
        return min(max(self._sums.mean, self._low), self._high) if self.count else None

    @property
    def variance(self) -> float | None:
        """Population variance M2 / n; None without values."""
        return self._sums.m2 / self.count if self.count else None

    @property
    def std(self) -> float | None:
        """Square root of `variance`; None without values."""
        return math.sqrt(self._sums.m2 / self.count) if self.count else None

    @property
    def minimum(self) -> float | None:
        """Smallest finite value; None without values."""
        return self._low if self.count else None

    @property
    def maximum(self) -> float | None:
        """Largest finite value; None without values."""
        return self._high if self.count else None

    def merge(self, other: Self) -> Self:
        """Add the values of `other`."""
        self._check_mergeable(other)
        self.counts.merge(other.counts)
        self._sums = combine(self._sums, other._sums)
        self._low, self._high = min(self._low, other._low), max(self._high, other._high)
        return self

    def state_dict(self) -> State:
        numbers = np.array([self._sums.mean, self._sums.m2, self._low, self._high])
        return {"kind": "Moments", "counts": self.counts.to_array(), "numbers": numbers}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        cls._check_kind(state)
        moments = cls()
        moments.counts = Count.from_array(state["counts"])
        mean, m2, moments._low, moments._high = (float(x) for x in state["numbers"])
        moments._sums = Sums(moments.counts.finite, mean, m2)
        return moments
