"""Moments and correlations against straight definitions in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from zloss.streaming import CoMoments, Count, Moments

RNG = np.random.default_rng(3)
STREAMS = {
    "normal": RNG.standard_normal(1000),
    "shifted": 1e8 + RNG.standard_normal(1000),
    "heavy tail": np.exp(10 * RNG.standard_normal(1000)),
    "fp32": RNG.standard_normal(1000).astype(np.float32),
    "subnormal": RNG.standard_normal(1000) * 1e-310,
    "alternating": np.tile([1e15, -1e15, 1.0], 333),
}


def definition(x: np.ndarray, y: np.ndarray) -> tuple[Fraction, Fraction]:
    """Mean of x and covariance of x and y, in rational arithmetic."""
    xs, ys = [Fraction(float(v)) for v in x], [Fraction(float(v)) for v in y]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return mean_x, sum((a - mean_x) * (b - mean_y) for a, b in zip(xs, ys, strict=True)) / len(xs)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_moments_equal_the_definition(name, batch):
    x = STREAMS[name]
    moments = Moments()
    for start in range(0, x.size, batch):
        moments.update(x[start : start + batch])
    mean, variance = definition(x, x)
    eps, scale, spread = 64 * np.finfo(np.float64).eps, float(np.abs(x).max()), float(np.ptp(x))
    assert abs(moments.mean - float(mean)) <= eps * scale + x.size * 5e-324  # subnormals round to whole steps
    assert abs(moments.variance - float(variance)) <= eps * spread * (spread + scale)
    assert moments.std == math.sqrt(moments.variance)
    assert (moments.count, moments.minimum, moments.maximum) == (x.size, x.min(), x.max())


@pytest.mark.parametrize("value", [0.1, -3e300, 5e-324, 1e8 + 0.1])
def test_a_constant_stream_has_its_value_and_no_variance(value):
    moments = Moments()
    for size in (3, 1, 1000, 77):
        moments.update(np.full(size, value))
    assert (moments.mean, moments.variance, moments.minimum, moments.maximum) == (value, 0.0, value, value)


def test_a_variance_beyond_fp64_is_inf_and_the_mean_stays():
    moments = Moments()
    moments.update(np.array([1.7e308, 1.7e308, -1.7e308, 1.6e308]))
    moments.update(np.array([-1.7e308]))
    assert moments.mean == pytest.approx(0.32e308, rel=1e-12)
    assert moments.variance == math.inf


def test_without_finite_values_there_is_no_answer():
    moments = Moments()
    for values in ([], [math.nan, math.inf, -math.inf, math.nan]):
        moments.update(values)
        answers = (moments.mean, moments.variance, moments.std, moments.minimum, moments.maximum)
        assert answers == (None,) * 5
    assert moments.counts.to_array().tolist() == [0, 2, 1, 1]


def test_count_tells_the_kinds_apart():
    count = Count()
    count.update([1.0, math.nan, math.inf, -math.inf, -math.inf, 2.0, 3.0])
    assert (count.finite, count.nan, count.positive_infinite, count.negative_infinite) == (3, 1, 1, 2)
    assert (count.nonfinite, count.total) == (4, 7)


@pytest.mark.parametrize("name", STREAMS)
def test_correlation_equals_the_definition(name):
    x = STREAMS[name].astype(np.float64)
    y = x * 0.3 + np.roll(x, 1)
    pairs = CoMoments()
    for start in range(0, x.size, 77):
        pairs.update(x[start : start + 77], y[start : start + 77])
    covariance = definition(x, y)[1]
    variance_x, variance_y = definition(x, x)[1], definition(y, y)[1]
    if name == "subnormal":  # squares of subnormals are 0 in fp64: no variance to divide by
        assert pairs.correlation is None
        return
    truth = float(covariance) / math.sqrt(float(variance_x)) / math.sqrt(float(variance_y))
    condition = float(np.abs(x).max()) / math.sqrt(float(variance_x))
    assert abs(pairs.correlation - truth) <= 256 * np.finfo(np.float64).eps * (1 + condition)


def test_a_pair_with_a_nonfinite_side_is_left_out():
    pairs = CoMoments()
    pairs.update([1.0, 2.0, math.nan, 3.0, math.inf], [2.0, 4.0, 1.0, 6.0, -math.inf])
    assert pairs.correlation == pytest.approx(1.0, abs=1e-15)
    assert pairs.counts.to_array().tolist() == [3, 1, 1, 0]
    assert pairs.means == (2.0, 4.0)


@pytest.mark.parametrize("x", [[], [1.0], [2.0, 2.0, 2.0], [0.1] * 10])
def test_without_variance_there_is_no_correlation(x):
    pairs = CoMoments()
    pairs.update(x, np.arange(len(x)))
    assert pairs.correlation is None
    assert (pairs.means is None) == (pairs.covariance is None) == (pairs.variances is None) == (not x)
