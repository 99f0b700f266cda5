"""Histogram: the counts of numpy's on its own edges, and a range that follows the data."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zloss.errors import InputError
from zloss.streaming import Histogram

finite = st.floats(allow_nan=False, allow_infinity=False)


def filled(x, bins: int = 16) -> Histogram:
    histogram = Histogram(bins)
    histogram.update(np.asarray(x, dtype=np.float64))
    return histogram


def definition(x, edges) -> list[int]:
    """Values in each [left, right); the last edge may stand for a number beyond fp64."""
    x = np.asarray(x)
    pairs = list(itertools.pairwise(edges))
    inside = [(left <= x) & ((x < right) | (i == len(pairs) - 1)) for i, (left, right) in enumerate(pairs)]
    return [int(here.sum()) for here in inside]


@settings(max_examples=200, deadline=None)
@given(x=st.lists(finite, min_size=1, max_size=40), bins=st.integers(2, 40))
def test_counts_equal_the_definition(x, bins):
    edges, counts = filled(x, bins).bars()
    assert counts.size <= bins
    assert (counts[0] > 0, counts[-1] > 0) == (True, True)
    assert counts.tolist() == definition(x, edges)
    assert counts.sum() == len(x)


@settings(max_examples=200, deadline=None)
@given(x=st.lists(finite, min_size=1, max_size=40, unique=True), order=st.randoms())
def test_order_of_arrival_does_not_show(x, order):
    one_by_one, shuffled = Histogram(16), list(x)
    order.shuffle(shuffled)
    for value in shuffled:
        one_by_one.update(value)
    for mine, theirs in zip(one_by_one.bars(), filled(x).bars(), strict=True):
        assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_at_least_half_of_the_bins_are_used(scale, shift):
    x = (np.random.default_rng(0).standard_normal(10_000) + shift) * scale
    histogram = filled(x, 512)
    edges, counts = histogram.bars()
    assert 256 <= counts.size <= 512
    assert counts.tolist() == np.histogram(x, edges)[0].tolist()
    assert np.diff(edges).tolist() == [histogram.width] * counts.size


def test_a_late_outlier_widens_the_bins_without_loss():
    histogram = filled(np.linspace(-1, 1, 1001), 64)
    histogram.update(1e6)
    edges, counts = histogram.bars()
    assert counts.sum() == 1002
    assert (counts[-1], edges[-2] <= 1e6 < edges[-1]) == (1, True)
    assert counts[edges[:-1] < 0].sum() == 500


def test_a_tiny_negative_value_stays_below_zero_when_bins_grow():
    histogram = filled([-5e-324])
    histogram.update([0.0, 1e300])
    edges, counts = histogram.bars()
    assert counts[edges[:-1] < 0].sum() == 1


@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -7.0, 5e-324, 1.7e308])
def test_a_constant_stream_fills_one_bin(value):
    edges, counts = filled([value] * 5).bars()
    assert counts.tolist() == [5]
    assert edges[0] <= value <= edges[1]


def test_edges_are_finite_at_the_end_of_fp64():
    edges, counts = filled([-1.79e308, 1.79e308]).bars()
    assert np.isfinite(edges).all()
    assert counts.sum() == 2


def test_without_values_there_are_no_bars():
    histogram = Histogram()
    histogram.update([math.nan, math.inf])
    assert (histogram.bars(), histogram.width, histogram.count) == (None, None, 0)


@pytest.mark.parametrize("bins", [0, 1, 2.5])
def test_a_number_of_bins_that_cannot_nest_is_refused(bins):
    with pytest.raises(InputError, match="bins"):
        Histogram(bins)
