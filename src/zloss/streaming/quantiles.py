"""Quantiles of a stream, exact up to a stated number of values and bounded past it.

Guarantee: up to `exact_limit` finite values the quantile is exact (linear interpolation between order statistics, as
numpy's and torch's default) and any split and merge equals one stream bit for bit; past it a rank sketch answers with
the values at its lower and upper rank bound, between which the exact quantile lies after any split and merge.
Memory: 4 bytes per fp32 value (8 per fp64) while exact, released at the switch; about 0.2 MB after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from zloss.errors import InputError
from zloss.streaming.accumulator import Accumulator, State, check_size
from zloss.streaming.batch import FloatArray, slices
from zloss.streaming.count import Count
from zloss.streaming.order_statistics import OrderStatistics
from zloss.streaming.rank_sketch import DEFAULT_K, RankSketch, check_k

EXACT_LIMIT = 1 << 22


@dataclass(frozen=True)
class QuantileEstimate:
    """A quantile and the values between which it lies; if it is exact, `lower == value == upper`."""

    value: float
    lower: float
    upper: float
    exact: bool


class Quantiles(Accumulator):
    """Streaming quantiles; the smallest and the largest value stay exact always."""

    def __init__(self, *, exact_limit: int = EXACT_LIMIT, k: int = DEFAULT_K) -> None:
        self.exact_limit = check_size("exact_limit", exact_limit, 0)
        self.k = check_k(k)
        self.counts = Count()
        self._low, self._high = math.inf, -math.inf
        self._all: OrderStatistics | None = OrderStatistics()
        self._sketch: RankSketch | None = None

    def update(self, values: Any) -> None:
        """Take `values`; nonfinite ones only count."""
        for x_T in self.counts.admit(values):
            self._low = min(self._low, float(x_T.min()))
            self._high = max(self._high, float(x_T.max()))
            self._take(x_T)

    @property
    def count(self) -> int:
        """Finite values seen."""
        return self.counts.finite

    @property
    def exact(self) -> bool:
        """Whether every quantile is still exact."""
        return self._sketch is None

    def quantile(self, q: float) -> QuantileEstimate | None:
        """The q-quantile, 0 ≤ q ≤ 1; None without values.

        High ranks are the accurate ones in sketch mode; for a low tail, accumulate the negated values.
        """
        if not 0 <= q <= 1:
            raise InputError(f"`q` is expected to lie in [0, 1], but got {q!r}; p99 is 0.99.")
        if not self.count:
            return None
        if q in (0, 1) or self._low == self._high:
            value = self._low + 0.0 if q == 0 else self._high + 0.0
            return QuantileEstimate(value, value, value, exact=True)
        if self._sketch is None:
            assert self._all is not None
            value = self._all.quantile(q)
            return QuantileEstimate(value, value, value, exact=True)
        value, lower, upper = (min(max(x, self._low), self._high) for x in self._sketch.quantile(q))
        return QuantileEstimate(value, lower, upper, exact=False)

    def merge(self, other: Self) -> Self:
        """Add the values of `other`; exact while the total fits `exact_limit`, a sketch otherwise."""
        self._check_mergeable(other, "exact_limit", "k")
        theirs, their_sketch = other._all, other._sketch  # read first: `other` may be `self`
        self.counts.merge(other.counts)
        self._low, self._high = min(self._low, other._low), max(self._high, other._high)
        if their_sketch is not None:
            self._to_sketch().merge(their_sketch)
        elif theirs is not None:
            self._take(theirs.values())
        return self

    def _take(self, x_T: FloatArray) -> None:
        if self._all is not None and len(self._all) + x_T.size <= self.exact_limit:
            self._all.append(x_T, limit=self.exact_limit)
        else:
            self._to_sketch().update(x_T)

    def _to_sketch(self) -> RankSketch:
        """The sketch; at the first call it takes over the stored values and their memory is released."""
        if self._sketch is None:
            sketch = RankSketch(self.k)
            if self._all is not None:
                sketch.update(self._all.values())
            self._sketch, self._all = sketch, None
        return self._sketch

    def state_dict(self) -> State:
        sketch = b"" if self._sketch is None else self._sketch.to_bytes()
        return {
            "kind": "Quantiles",
            "exact_limit": self.exact_limit,
            "k": self.k,
            "counts": self.counts.to_array(),
            "range": np.array([self._low, self._high]) + 0.0,
            "values": np.empty(0, np.float32) if self._all is None else self._all.sorted_values().copy(),
            "sketch": np.frombuffer(sketch, dtype=np.uint8),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        cls._check_kind(state)
        quantiles = cls(exact_limit=int(state["exact_limit"]), k=int(state["k"]))
        quantiles.counts = Count.from_array(state["counts"])
        quantiles._low, quantiles._high = (float(x) for x in state["range"])
        if state["sketch"].size:
            quantiles._sketch, quantiles._all = RankSketch.from_bytes(state["sketch"].tobytes()), None
        else:
            values = state["values"]
            for part in slices(values.size):
                quantiles._take(values[part])
        return quantiles
