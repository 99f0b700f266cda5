"""Accumulators with one deliberate mistake each: every one must be caught by a law."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from zloss.streaming import CoMoments, Count, HashSample, Histogram, Moments, Quantiles, TopTokens
from zloss.streaming.order_statistics import OrderStatistics, interpolate
from zloss.streaming.table import concatenate, take


class MeanOfMeans(Moments):
    """Forgets the weights of the parts."""

    def merge(self, other):
        mean = (self._sums.mean + other._sums.mean) / 2
        super().merge(other)
        self._sums = replace(self._sums, mean=mean)
        return self


class AddedVariances(Moments):
    """Forgets the distance between the means."""

    def merge(self, other):
        m2 = self._sums.m2 + other._sums.m2
        super().merge(other)
        self._sums = replace(self._sums, m2=m2)
        return self


class DropsTheCross(CoMoments):
    """Adds the co-moments of the parts without the product of the distances of their means."""

    def merge(self, other):
        c = self._sums.c + other._sums.c
        super().merge(other)
        self._sums = replace(self._sums, c=c)
        return self


class OneFurther(OrderStatistics):
    """Interpolates around index q n instead of q (n − 1)."""

    def quantile(self, q):
        x = self.sorted_values()
        index = min(x.size * q, x.size - 1)
        below = math.floor(index)
        return interpolate(float(x[below]), float(x[min(below + 1, x.size - 1)]), index - below)


class OffByOne(Quantiles):
    def __init__(self, **options):
        super().__init__(**options)
        self._all = OneFurther()


class LosesThePart(Quantiles):
    """Drops the second sketch of a merge, but counts it."""

    def merge(self, other):
        counts, sketch = other.counts, other._sketch
        if self._sketch is None or sketch is None:
            return super().merge(other)
        self.counts.merge(counts)
        self._low, self._high = min(self._low, other._low), max(self._high, other._high)
        return self


class OneSided(Quantiles):
    """States the estimate itself as its bounds."""

    def quantile(self, q):
        estimate = super().quantile(q)
        return estimate and replace(estimate, lower=estimate.value, upper=estimate.value)


class TruncatingHistogram(Histogram):
    """Rounds bins toward zero, where they must be rounded down."""

    def _place(self, index, exponent):
        half = np.sign(index) * (np.abs(index) >> min(self._exponent - exponent, 62))
        return np.clip(half - self._first, 0, self.bins - 1)


class FirstComeTop(TopTokens):
    """Breaks ties by arrival."""

    def _add(self, rows):
        rows = concatenate(self._table, rows)
        self._table = take(rows, np.argsort(-rows["score"], kind="stable")[: self.k])


class FirstComeSample(HashSample):
    """Keeps what came first."""

    def _add(self, rows):
        if len(self._table["index"]) < self.limit:
            super()._add(rows)


class SharingHistogram(Histogram):
    """Takes over the other's counts by reference when it is empty itself."""

    def merge(self, other):
        if self.count:
            return super().merge(other)
        self.__dict__.update(other.__dict__)
        return self

    def state_dict(self):
        return super().state_dict() | {"kind": type(self).__name__}


class ForgetsTheKind(Count):
    """Counts -Inf as +Inf."""

    def filter(self, *columns):
        return super().filter(*(np.abs(c) if c.dtype.kind == "f" else c for c in columns))


class SinglePrecisionMoments(Moments):
    """Stores its state in fp32."""

    def state_dict(self):
        state = super().state_dict()
        return state | {"kind": type(self).__name__, "numbers": state["numbers"].astype(np.float32)}
