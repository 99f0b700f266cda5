"""How many values came, and how many of them were NaN, +Inf or -Inf.

Guarantee: exact; any split and merge equals one stream bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zloss.streaming.accumulator import Accumulator, State, int_array
from zloss.streaming.batch import FloatArray, as_floats, flatten, slices


class Count(Accumulator):
    """Counts of finite and nonfinite values; every accumulator of values has one as its `counts` and its filter."""

    def __init__(self) -> None:
        self.finite = 0
        self.nan = 0
        self.positive_infinite = 0
        self.negative_infinite = 0

    @property
    def nonfinite(self) -> int:
        """NaN, +Inf and -Inf together."""
        return self.nan + self.positive_infinite + self.negative_infinite

    @property
    def total(self) -> int:
        """All values that came."""
        return self.finite + self.nonfinite

    def update(self, values: Any) -> None:
        """Count `values`."""
        for _ in self.admit(values):
            pass

    def admit(self, values: Any) -> Iterator[FloatArray]:
        """Count `values` and hand on the finite ones, in nonempty fp32 or fp64 slices."""
        flat = flatten(values)
        for part in slices(flat.shape[0]):
            x_T = as_floats(flat[part])
            keep_T = self.filter(x_T)
            x_T = x_T if keep_T is None else x_T[keep_T]
            if x_T.size:
                yield x_T

    def filter(self, *columns: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Count rows and tell which are finite in every column; None means all of them.

        A row counts once: as NaN if any column is NaN, else as +Inf if any is +Inf, else as -Inf.
        """
        keep_T: NDArray[np.bool_] = np.isfinite(columns[0])
        for column in columns[1:]:
            keep_T &= np.isfinite(column)
        finite = int(np.count_nonzero(keep_T))
        self.finite += finite
        if finite == keep_T.size:
            return None
        bad_NC = np.stack([column[~keep_T] for column in columns], axis=1)
        nan_N = np.isnan(bad_NC).any(axis=1)
        positive_N = ~nan_N & (bad_NC == np.inf).any(axis=1)
        self.nan += int(nan_N.sum())
        self.positive_infinite += int(positive_N.sum())
        self.negative_infinite += int((~nan_N & ~positive_N).sum())
        return keep_T

    def merge(self, other: Self) -> Self:
        """Add the counts of `other`."""
        self._check_mergeable(other)
        self._set(self.to_array() + other.to_array())
        return self

    def to_array(self) -> NDArray[np.int64]:
        """[finite, NaN, +Inf, -Inf], the form in which other accumulators store their counts."""
        return int_array([self.finite, self.nan, self.positive_infinite, self.negative_infinite])

    @classmethod
    def from_array(cls, counts: Any) -> Self:
        """The inverse of `to_array`."""
        count = cls()
        count._set(int_array(counts))
        return count

    def state_dict(self) -> State:
        return {"kind": "Count", "counts": self.to_array()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        cls._check_kind(state)
        return cls.from_array(state["counts"])

    def _set(self, counts: NDArray[np.int64]) -> None:
        self.finite, self.nan, self.positive_infinite, self.negative_infinite = (int(c) for c in counts)
