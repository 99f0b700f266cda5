"""Quantiles: numpy's definition while exact, truthful bounds after, and the memory of a long stream."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zloss.errors import InputError, MissingDependencyError
from zloss.streaming import Quantiles
from zloss.streaming.order_statistics import interpolate
from zloss.streaming.quantiles import EXACT_LIMIT

finite = st.floats(allow_nan=False, allow_infinity=False)


def filled(x, **options) -> Quantiles:
    quantiles = Quantiles(**options)
    quantiles.update(x)
    return quantiles


@settings(max_examples=200, deadline=None)
@given(x=st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30), q=st.floats(0, 1))
def test_exact_quantiles_are_numpys(x, q):
    estimate = filled(np.array(x)).quantile(q)
    truth = float(np.quantile(np.array(x), q))
    assert estimate.exact
    assert estimate.lower == estimate.value == estimate.upper
    assert abs(estimate.value - truth) <= 2 * np.finfo(np.float64).eps * max(abs(v) for v in x)
    assert min(x) <= estimate.value <= max(x)


def test_exact_quantiles_are_torchs():
    x = torch.randn(10_001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for q in (0.0, 0.25, 0.99, 0.999, 1.0):
        assert filled(x).quantile(q).value == pytest.approx(float(torch.quantile(x, q)), rel=1e-15)


@given(a=finite, b=finite, t=st.floats(0, 1))
def test_interpolation_stays_between_its_ends_and_meets_them(a, b, t):
    a, b = min(a, b), max(a, b)
    assert a <= interpolate(a, b, t) <= b
    assert (interpolate(a, b, 0.0), interpolate(a, b, 1.0)) == (a, b)


def test_the_default_is_exact_up_to_two_to_the_22():
    assert Quantiles().exact_limit == EXACT_LIMIT == 2**22
    x = np.random.default_rng(0).permutation(2**22).astype(np.float32)
    quantiles = filled(x)
    assert quantiles.exact
    assert quantiles.quantile(0.999).value == np.quantile(np.arange(2.0**22), 0.999)
    quantiles.update([1.0])
    assert not quantiles.exact


@pytest.mark.parametrize("limit", [0, 1, 10])
def test_the_switch_comes_with_the_first_value_past_the_limit(limit):
    quantiles = filled(np.arange(limit), exact_limit=limit)
    assert quantiles.exact
    quantiles.update([np.nan])
    assert quantiles.exact
    quantiles.update([3.0])
    assert not quantiles.exact
    assert quantiles.count == limit + 1


def test_parts_that_fit_alone_but_not_together_become_a_sketch():
    x = np.random.default_rng(0).standard_normal(3000)
    quantiles = filled(x[:1500], exact_limit=2000).merge(filled(x[1500:], exact_limit=2000))
    estimate = quantiles.quantile(0.99)
    assert not estimate.exact
    assert estimate.lower <= np.quantile(x, 0.99) <= estimate.upper


def test_bounds_are_narrow_at_high_ranks():
    x = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
    quantiles = filled(x, exact_limit=1000)
    for q, width in ((0.5, 0.01), (0.99, 0.01), (0.999, 0.01)):
        estimate = quantiles.quantile(q)
        assert estimate.lower <= np.quantile(x.astype(np.float64), q) <= estimate.upper
        assert estimate.upper - estimate.lower < width


def test_the_ends_stay_exact_in_sketch_mode():
    x = np.random.default_rng(0).standard_normal(100_000)
    quantiles = filled(x, exact_limit=0)
    for q, truth in ((0.0, x.min()), (1.0, x.max())):
        estimate = quantiles.quantile(q)
        assert estimate.exact
        assert estimate.lower == estimate.value == estimate.upper == truth


@pytest.mark.parametrize("scale", [1 / 3, 1e-46, 1e30, 1e300])
def test_bounds_allow_for_the_rounding_of_fp64_to_fp32(scale):
    x = (1 + np.arange(2000) * 1e-9) * scale
    quantiles = filled(x, exact_limit=0)
    for q in (0.1, 0.5, 0.99, 0.999):
        estimate = quantiles.quantile(q)
        assert estimate.lower <= np.quantile(x, q) <= estimate.upper
        assert np.isfinite([estimate.lower, estimate.value, estimate.upper]).all()


def test_mixed_precision_keeps_the_wider():
    quantiles = filled(np.float32([1, 2]))
    quantiles.update(np.array([0.1]))
    quantiles.update(np.float32([3]))
    assert quantiles.state_dict()["values"].tolist() == [0.1, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("q", [-0.1, 1.1, 99, float("nan")])
def test_a_rank_outside_of_zero_and_one_is_refused(q):
    with pytest.raises(InputError, match=r"p99 is 0\.99"):
        filled([1.0]).quantile(q)


@pytest.mark.parametrize("k", [0, 4, 10, 13, 255, 256, 300, 12.5])
def test_a_k_that_the_package_would_change_silently_is_refused(k):
    with pytest.raises(InputError, match="even number from 12 to 254"):
        Quantiles(k=k)


def test_k_254_is_what_the_package_uses():
    import datasketches

    assert datasketches.req_floats_sketch(Quantiles().k, True).k == 254


@pytest.mark.parametrize("limit", [-1, 2.5])
def test_a_limit_that_is_no_size_is_refused(limit):
    with pytest.raises(InputError, match="exact_limit"):
        Quantiles(exact_limit=limit)


def test_without_values_there_is_no_quantile():
    assert Quantiles().quantile(0.99) is None
    assert filled([float("nan"), float("inf")], exact_limit=0).quantile(0.99) is None


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketches", None)
    assert filled(np.arange(5), exact_limit=5).quantile(0.5).value == 2.0
    with pytest.raises(MissingDependencyError, match=r"zloss\[audit\]"):
        filled(np.arange(6), exact_limit=5)


def test_exact_quantiles_do_not_load_the_sketch_package():
    code = "import sys; from zloss.streaming import Quantiles; q = Quantiles(); q.update([1.0]); q.quantile(0.5)"
    check = "; raise SystemExit('datasketches' in sys.modules)"
    subprocess.run([sys.executable, "-c", code + check], check=True)


def test_stored_values_grow_without_a_second_copy_and_are_released_at_the_switch():
    batch = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    limit_bytes = 4 << 20
    tracemalloc.start()
    quantiles = Quantiles(exact_limit=1 << 20)
    for _ in range(16):
        quantiles.update(batch)
    quantiles.quantile(0.99)
    held, peak = tracemalloc.get_traced_memory()
    assert quantiles.exact
    assert limit_bytes <= held <= 1.1 * limit_bytes
    assert peak <= 1.5 * limit_bytes + 2**11  # Python 3.13 itself holds 1.5 KB more
    quantiles.update(batch)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= 0.1 * limit_bytes
