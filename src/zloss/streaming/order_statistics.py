"""All values of a stream in one growing array, for exact quantiles.

Guarantee: holds every value in the precision it came in; the sorted array does not depend on the order of arrival.
"""

from __future__ import annotations

import math

import numpy as np

from zloss.streaming.batch import FloatArray


class OrderStatistics:
    """A growing fp32 array, fp64 from the first fp64 value on, sorted in place when it is asked."""

    def __init__(self) -> None:
        self._data: FloatArray = np.empty(0, dtype=np.float32)
        self._used = 0
        self._sorted = True

    def __len__(self) -> int:
        return self._used

    def append(self, x_T: FloatArray, *, limit: int) -> None:
        """Take finite values; memory doubles as it grows, but not past `limit` values."""
        if not x_T.size:
            return
        if np.may_share_memory(x_T, self._data):
            x_T = x_T.copy()
        if x_T.dtype == np.float64 and self._data.dtype == np.float32:
            self._data = self._data[: self._used].astype(np.float64)
        needed = self._used + x_T.size
        if needed > self._data.size:
            # realloc: large blocks are remapped by the system, so growth has no second copy in memory
            self._data.resize(max(needed, min(2 * self._data.size, limit)), refcheck=False)
        self._data[self._used : needed] = x_T
        self._used = needed
        self._sorted = False

    def values(self) -> FloatArray:
        """A view of the values in no particular order, valid until the next `append`."""
        return self._data[: self._used]

    def sorted_values(self) -> FloatArray:
        """A view of the values in ascending order, valid until the next `append`."""
        values = self.values()
        if not self._sorted:
            # -0.0 becomes 0.0, so that equal numbers have equal bits and the order of arrival does not matter.
            values += 0.0
            values.sort()
            self._sorted = True
        return values

    def quantile(self, q: float) -> float:
        """Linear interpolation between the order statistics around index q (n − 1), in fp64."""
        x_T = self.sorted_values()
        index = (x_T.size - 1) * q
        below = math.floor(index)
        above = min(below + 1, x_T.size - 1)
        return interpolate(float(x_T[below]), float(x_T[above]), index - below)


def interpolate(a: float, b: float, t: float) -> float:
    """a + t (b − a) for a ≤ b, from the nearer end, so that it is exact at both and never leaves [a, b]."""
    gap = b - a
    if math.isinf(gap):
        return a * (1 - t) + b * t
    return min(a + gap * t, b) if t < 0.5 else max(b - gap * (1 - t), a)
