"""Pearson correlation of two streams read in pairs.

Guarantee: equals the correlation of one stream to fp64 rounding under any split and merge. A pair with a nonfinite
side is counted and left out; without two pairs or without variance on either side the answer is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from zloss.streaming.accumulator import Accumulator, State
from zloss.streaming.batch import FloatArray, as_floats, flatten, length, slices
from zloss.streaming.count import Count
from zloss.streaming.moments import Sums, combine, sums_of


@dataclass(frozen=True)
class PairSums:
    """The mergeable core: the sums of either side and C = Σ (x − mean_x)(y − mean_y)."""

    x: Sums = field(default_factory=Sums)
    y: Sums = field(default_factory=Sums)
    c: float = 0.0


def pair_sums_of(x_T: FloatArray, y_T: FloatArray) -> PairSums:
    """The sums of one nonempty batch of pairs, by two passes in fp64."""
    x, y = sums_of(x_T), sums_of(y_T)
    with np.errstate(over="ignore", invalid="ignore"):
        dx_T = x_T.astype(np.float64, copy=False) - x.mean
        dy_T = y_T.astype(np.float64, copy=False) - y.mean
        c = float(np.dot(dx_T, dy_T) - dx_T.sum() * dy_T.sum() / dx_T.size)
    return PairSums(x, y, c)


def combine_pairs(a: PairSums, b: PairSums) -> PairSums:
    """C = C_a + C_b + δ_x δ_y n_a n_b/n, and Chan's update of either side."""
    if a.x.count == 0 or b.x.count == 0:
        return b if a.x.count == 0 else a
    weight = a.x.count / (a.x.count + b.x.count) * b.x.count
    c = a.c + b.c + (b.x.mean - a.x.mean) * weight * (b.y.mean - a.y.mean)
    return PairSums(combine(a.x, b.x), combine(a.y, b.y), c)


class CoMoments(Accumulator):
    """Streaming Pearson correlation, with the means and variances of both sides."""

    def __init__(self) -> None:
        self.counts = Count()
        self._sums = PairSums()

    def update(self, x: Any, y: Any) -> None:
        """Take the pairs (x_t, y_t); both sides have the same number of values."""
        x_flat, y_flat = flatten(x, "x"), flatten(y, "y")
        for part in slices(length(x=x_flat, y=y_flat)):
            x_T, y_T = as_floats(x_flat[part]), as_floats(y_flat[part])
            keep_T = self.counts.filter(x_T, y_T)
            if keep_T is not None:
                x_T, y_T = x_T[keep_T], y_T[keep_T]
            if x_T.size:
                self._sums = combine_pairs(self._sums, pair_sums_of(x_T, y_T))

    @property
    def count(self) -> int:
        """Pairs with both sides finite."""
        return self._sums.x.count

    @property
    def means(self) -> tuple[float, float] | None:
        """Mean of x and of y; None without pairs."""
        return (self._sums.x.mean, self._sums.y.mean) if self.count else None

    @property
    def variances(self) -> tuple[float, float] | None:
        """Population variance of x and of y; None without pairs."""
        return (self._sums.x.m2 / self.count, self._sums.y.m2 / self.count) if self.count else None

    @property
    def covariance(self) -> float | None:
        """Population covariance C / n; None without pairs."""
        return self._sums.c / self.count if self.count else None

    @property
    def correlation(self) -> float | None:
        """C / √(M2_x M2_y) in [−1, 1]; None where it is 0/0 or its squares left fp64."""
        scale = math.sqrt(self._sums.x.m2) * math.sqrt(self._sums.y.m2)
        if self.count < 2 or scale == 0 or not math.isfinite(scale) or not math.isfinite(self._sums.c):
            return None
        return min(max(self._sums.c / scale, -1.0), 1.0)

    def merge(self, other: Self) -> Self:
        """Add the pairs of `other`."""
        self._check_mergeable(other)
        self.counts.merge(other.counts)
        self._sums = combine_pairs(self._sums, other._sums)
        return self

    def state_dict(self) -> State:
        s = self._sums
        numbers = np.array([s.x.mean, s.x.m2, s.y.mean, s.y.m2, s.c])
        return {"kind": "CoMoments", "counts": self.counts.to_array(), "numbers": numbers}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        cls._check_kind(state)
        pairs = cls()
        pairs.counts = Count.from_array(state["counts"])
        x_mean, x_m2, y_mean, y_m2, c = (float(x) for x in state["numbers"])
        n = pairs.counts.finite
        pairs._sums = PairSums(Sums(n, x_mean, x_m2), Sums(n, y_mean, y_m2), c)
        return pairs
