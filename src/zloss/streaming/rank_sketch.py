"""Quantiles of an unbounded stream from Apache DataSketches' relative-error (REQ) sketch, high ranks accurate.

Guarantee: the true quantile lies in [lower, upper] with overwhelming probability, after any split and merge. The
sketch's stated standard error of a rank r is about 0.13 (1 − r) / k (0.084 / k at most), and zero for the largest 3k
values; the bounds stand 6 of them to either side. Six, because the measured root mean square error reaches 1.9 times
the stated one on descending streams. Its coin flips are not seeded: two runs differ within the bounds.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from zloss.errors import InputError, MissingDependencyError
from zloss.streaming.batch import FloatArray, slices

DEFAULT_K = 254
"""The largest accuracy there is: about 0.2 MB for 10^8 values."""

STANDARD_ERRORS = 6
"""Half width of the stated bounds."""


class RankSketch:
    """A mergeable sketch of finite values; ranks are kept approximately, values in fp32."""

    def __init__(self, k: int = DEFAULT_K) -> None:
        self._sketch: Any = _package().req_floats_sketch(check_k(k), True)
        self._rounded = False

    def __len__(self) -> int:
        return int(self._sketch.n)

    def update(self, x_T: FloatArray) -> None:
        """Take finite values; fp64 is rounded to fp32, which the bounds then allow for."""
        for part in slices(x_T.size):
            x_S = x_T[part]
            with np.errstate(over="ignore"):
                narrow_S = np.ascontiguousarray(x_S, dtype=np.float32)
            self._rounded = self._rounded or (x_S.dtype == np.float64 and not np.array_equal(narrow_S, x_S))
            self._sketch.update(narrow_S)

    def merge(self, other: Self) -> None:
        """Add the values of `other`."""
        sketch = type(self._sketch).deserialize(self._sketch.serialize()) if other is self else other._sketch
        self._sketch.merge(sketch)
        self._rounded = self._rounded or other._rounded

    def quantile(self, q: float) -> tuple[float, float, float]:
        """The value at rank q, and the values at its lower and upper rank bound; ∓inf for a bound outside [0, 1]."""
        # num_std_dev of the package ends at 3, and its bounds are linear in it
        error = (self._sketch.get_rank_upper_bound(q, 1) - q) * STANDARD_ERRORS
        # interpolation between two order statistics reaches one item to either side of rank q
        item = 1 / len(self)
        value = self._sketch.get_quantile(q, True)
        low_rank, high_rank = q - error - item, q + error + item
        # the smallest retained item is not the smallest of the stream, so a rank of 0 is answered by no item
        lower = self._sketch.get_quantile(low_rank, True) if low_rank > 0 else -math.inf
        upper = self._sketch.get_quantile(high_rank, False) if high_rank < 1 else math.inf
        if self._rounded:
            lower = float(np.nextafter(np.float32(lower), np.float32(-np.inf)))
            upper = float(np.nextafter(np.float32(upper), np.float32(np.inf)))
        return value, lower, upper

    def to_bytes(self) -> bytes:
        """The sketch in the portable DataSketches format, after one byte that tells whether values were rounded."""
        return bytes([self._rounded]) + bytes(self._sketch.serialize())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of `to_bytes`."""
        sketch = cls.__new__(cls)
        sketch._rounded = bool(data[0])
        sketch._sketch = _package().req_floats_sketch.deserialize(data[1:])
        return sketch


def check_k(k: int) -> int:
    """`k`, refused where the package would silently take another one: it rounds odd numbers and wraps at 256.

    Below 12 its stated error is too small: at k = 4 one quantile in a few hundred leaves even the wide bounds.
    """
    if k not in range(12, 255, 2):
        raise InputError(f"`k` of a rank sketch is expected to be an even number from 12 to 254, but got {k!r}.")
    return k


def _package() -> Any:
    try:
        import datasketches
    except ImportError as error:
        raise MissingDependencyError("datasketches", "quantiles past the exact limit", "audit") from error
    return datasketches
