"""Everything that is read from columns against its straight definition, on hostile columns, and shown to notice mistakes.

Every property is a function that fails by assertion, so the last section can show that a deliberate mistake breaks it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zloss.measure import tokens
from zloss.measure.tokens import Array
from zloss.results.audit import Nonfinite

finite_floats = st.floats(allow_nan=False, allow_infinity=False)
PROPERTY = settings(max_examples=60, deadline=None)


# Columns that break careless statistics

SHAPES: dict[str, Callable[[Array, np.random.Generator], Array]] = {
    "constant": lambda normal, rng: np.full(len(normal), 0.1),
    "normal": lambda normal, rng: normal,
    "shifted": lambda normal, rng: 1e8 + normal,
    "heavy tail": lambda normal, rng: np.exp(8 * normal),
    "signed heavy tail": lambda normal, rng: np.sign(normal) * np.exp(8 * np.abs(normal)),
    "sorted": lambda normal, rng: np.sort(normal),
    "reversed": lambda normal, rng: np.sort(normal)[::-1],
    "duplicates": lambda normal, rng: rng.integers(-2, 3, len(normal)).astype(np.float64),
    "signed zeros": lambda normal, rng: np.where(normal > 0, 0.0, -0.0),
    "subnormal": lambda normal, rng: normal * 1e-39,
    "one outlier": lambda normal, rng: np.where(np.arange(len(normal)) == len(normal) // 2, 3e30, normal),
}


def shaped(name: str, size: int, rng: np.random.Generator) -> Array:
    return SHAPES[name](rng.standard_normal(size), rng)


@st.composite
def columns(draw: st.DrawFn) -> Array:
    """fp32 or fp64 values of a hostile shape, with or without NaN and ±Inf among them; possibly empty."""
    size = draw(st.one_of(st.integers(0, 3), st.integers(0, 400)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = shaped(draw(st.sampled_from(list(SHAPES))), size, rng)
    share = draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]))
    bad = rng.random(size) < share
    x = np.where(bad, rng.choice([np.nan, np.inf, -np.inf], size), x)
    return x.astype(draw(st.sampled_from([np.float32, np.float64])))


# Quantiles, means, correlations


def check_quantile(x: Array, q: float) -> None:
    known = x[np.isfinite(x)].astype(np.float64)
    found = tokens.quantile(x, q)
    if not known.size:
        assert found is None
        return
    assert found == float(np.quantile(known, q))


def check_mean(x: Array) -> None:
    known = x[np.isfinite(x)].astype(np.float64)
    found = tokens.mean(x)
    if not known.size:
        assert found is None
        return
    exact = math.fsum(known.tolist()) / known.size
    assert found == pytest.approx(exact, rel=1e-13, abs=1e-13 * float(np.abs(known).max()))


def check_correlation(x: Array, y: Array) -> None:
    keep = np.isfinite(x) & np.isfinite(y)
    a, b = x[keep].astype(np.float64), y[keep].astype(np.float64)
    found = tokens.correlation(x, y)
    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        assert found is None
        return
    a, b = a - math.fsum(a.tolist()) / a.size, b - math.fsum(b.tolist()) / b.size
    scale = math.sqrt(math.fsum((a * a).tolist())) * math.sqrt(math.fsum((b * b).tolist()))
    if scale == 0:
        assert found is None
    else:
        assert found == pytest.approx(math.fsum((a * b).tolist()) / scale, abs=1e-9)


@PROPERTY
@given(x=columns(), q=st.one_of(st.sampled_from([0.0, 0.5, 0.99, 0.999, 1.0]), st.floats(0, 1)))
def test_a_quantile_is_numpys_over_the_finite_values(x: Array, q: float) -> None:
    check_quantile(x, q)


@PROPERTY
@given(x=columns())
def test_a_mean_is_that_of_the_finite_values_in_fp64(x: Array) -> None:
    check_mean(x)


@pytest.mark.parametrize("name", [shape for shape in SHAPES if shape != "subnormal"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_correlation_equals_its_definition(name: str, dtype: Any) -> None:
    rng = np.random.default_rng(3)
    x = shaped(name, 500, rng).astype(dtype)
    check_correlation(x, x * 0.3 + rng.standard_normal(500) * np.abs(x).mean())
    check_correlation(x, x)
    check_correlation(np.where(np.arange(500) % 9 == 0, np.nan, x), np.where(np.arange(500) % 7 == 0, np.inf, -x))


def test_a_long_fp32_column_has_its_quantile_at_the_right_rank() -> None:
    """In fp32 the rank of p99.9 among 2^25 values would be wrong by whole ranks."""
    x = np.arange(2**25, dtype=np.float32)
    assert tokens.quantile(x, 0.999) == pytest.approx(0.999 * (2**25 - 1), abs=2.0)
    assert float(np.quantile(np.arange(1000, dtype=np.float32), 0.999)) == pytest.approx(998.001, abs=1e-3)


def test_what_has_no_values_has_no_number() -> None:
    for x in (None, np.empty(0), np.array([np.nan, np.inf])):
        assert (tokens.quantile(x, 0.5), tokens.mean(x)) == (None, None)
        assert x is None or tokens.correlation(x, x) is None
    assert tokens.perplexity({}) is None


def test_a_perplexity_that_overflows_is_none() -> None:
    assert tokens.perplexity({"ce": np.array([701.0])}) is None
    assert tokens.perplexity({"ce": np.array([1.0, 3.0, np.nan])}) == pytest.approx(math.exp(2))


def test_a_nonfinite_token_counts_once_and_nan_first() -> None:
    nan, inf = np.nan, np.inf
    found = tokens.nonfinite_tokens(
        {"ce": np.array([0, nan, inf, 0, nan]), "log_z": np.array([0, 0, 0, -inf, inf]), "gain": np.zeros(5)}
    )
    assert found == Nonfinite(nan=2, inf=2)


# Histograms


def check_bars(x: list[float], bins: int) -> None:
    found = tokens.bars(np.asarray(x, dtype=np.float64), bins)
    assert found is not None
    edges, counts = found
    pairs = list(itertools.pairwise(edges))
    values = np.asarray(x)
    # The last edge may stand for a number beyond fp64.
    inside = [(left <= values) & ((values < right) | (i == len(pairs) - 1)) for i, (left, right) in enumerate(pairs)]
    assert counts.size <= bins
    assert (counts[0] > 0, counts[-1] > 0) == (True, True)
    assert counts.tolist() == [int(here.sum()) for here in inside]
    assert counts.sum() == len(x)


@settings(max_examples=200, deadline=None)
@given(x=st.lists(finite_floats, min_size=1, max_size=40), bins=st.integers(2, 40))
def test_bars_count_every_value_once(x: list[float], bins: int) -> None:
    check_bars(x, bins)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_at_least_half_of_the_bins_are_used(scale: float, shift: float) -> None:
    x = (np.random.default_rng(0).standard_normal(10_000) + shift) * scale
    edges, counts = tokens.bars(x, 512) or ([], [])
    assert 256 <= len(counts) <= 512
    assert counts.tolist() == np.histogram(x, edges)[0].tolist()
    assert len(set(np.diff(edges).tolist())) == 1
    assert math.frexp(edges[1] - edges[0])[0] == 0.5  # a power of two


@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -7.0, 5e-324, 1.7e308])
def test_a_constant_column_fills_one_bin(value: float) -> None:
    edges, counts = tokens.bars(np.array([value] * 5)) or ([], [])
    assert counts.tolist() == [5]
    assert edges[0] <= value <= edges[1]


def test_bars_at_the_ends_of_fp64() -> None:
    edges, counts = tokens.bars(np.array([-1.79e308, 1.79e308])) or ([], [])
    assert np.isfinite(edges).all()
    assert counts.sum() == 2
    edges, counts = tokens.bars(np.array([-5e-324, 0.0, 1e300])) or ([], [])
    assert counts[edges[:-1] < 0].sum() == 1
    assert tokens.bars(np.empty(0)) is None


# Extreme and sampled tokens


def check_extremes(scores: list[float], k: int) -> None:
    order = sorted((i for i in range(len(scores)) if math.isfinite(scores[i])), key=lambda i: (-scores[i], i))
    assert tokens.extreme_rows(np.array(scores, dtype=np.float64), k) == order[:k]


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5, math.nan, math.inf, -math.inf]), max_size=40),
    k=st.integers(1, 12),
)
def test_extreme_tokens_are_the_first_of_the_sorted_table(scores: list[float], k: int) -> None:
    check_extremes(scores, k)


def check_sample(size: int, limit: int, seed: int, split: int) -> None:
    """The sample of a pass in pieces is that of the smallest hashes of the tokens that can be drawn."""
    index = np.arange(size)
    names = ("p_norm", "log_z", "delta_u", "rank16")
    table = dict.fromkeys(names, np.ones(size)) | {"gain": np.where(index % 11 == 3, np.nan, 1.0 + index)}
    good = index[index % 11 != 3]
    want = np.sort(good[np.argsort(tokens.hash_index(good, seed))[:limit]])
    sample = tokens.TokenSample(2, seed, limit)
    for start in range(0, size, split):
        part = {name: column[start : start + split] for name, column in table.items()}
        here = start + np.flatnonzero(tokens.drawable(part))
        sample.add(here, torch.from_numpy(np.stack([here, -here], axis=1)).double())
    assert sample.index_S.tolist() == want.tolist()
    assert sample.vectors_SD.tolist() == np.stack([want, -want], axis=1).tolist()


@pytest.mark.parametrize(("size", "limit"), [(0, 10), (50, 100), (3000, 100)])
@pytest.mark.parametrize("split", [7, 640, 5000])
def test_a_sample_holds_the_smallest_hashes(size: int, limit: int, split: int) -> None:
    for seed in (0, 5):
        check_sample(size, limit, seed, split)


def test_a_sample_is_uniform_over_the_text() -> None:
    def held(seed: int) -> Array:
        sample = tokens.TokenSample(0, seed, 10_000)
        sample.add(np.arange(200_000), np.empty((200_000, 0)))
        return sample.index_S

    counts = np.bincount(held(0) // 2000, minlength=100)  # 100 cells of 100 expected items each
    chi_square = float(((counts - 100.0) ** 2 / 100.0).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom: mean 99, standard deviation 14
    assert abs((held(0) % 2).mean() - 0.5) < 0.02
    assert 300 < len(np.intersect1d(held(0), held(1))) < 700  # 500 by chance


def test_a_hash_never_collides() -> None:
    index = np.concatenate([np.arange(100_000), 2**40 + np.arange(100_000)])
    assert np.unique(tokens.hash_index(index, 7)).size == index.size


# Parts


@PROPERTY
@given(x=columns(), cuts=st.lists(st.floats(0, 1), max_size=6))
def test_parts_in_order_are_the_whole_column(x: Array, cuts: list[float]) -> None:
    borders = [0, *sorted(int(cut * x.size) for cut in cuts), x.size]
    joined = tokens.concatenated([{"x": x[a:b]} for a, b in itertools.pairwise(borders)])
    assert joined["x"].tobytes() == x.tobytes()
    assert tokens.concatenated([]) == {}


# Deliberate mistakes

X = np.random.default_rng(0).standard_normal(300)
SCORES = [1.0, 3.0, 3.0, 2.0, math.nan, 3.0]
MISTAKES: dict[str, tuple[Callable[[], None], str, Any]] = {
    "the lower order statistic": (
        lambda: check_quantile(X, 0.99),
        "quantile",
        lambda x, q: float(np.quantile(x, q, method="lower")),
    ),
    "infinities inside a quantile": (
        lambda: check_quantile(np.append(X, [np.inf] * 20), 0.99),
        "finite",
        lambda x: x[~np.isnan(x)],
    ),
    "a mean in fp32": (
        lambda: check_mean(shaped("shifted", 300, np.random.default_rng(0))),
        "mean",
        lambda x: float(np.mean(x, dtype=np.float32)),
    ),
    "a mean of means": (
        lambda: check_mean(X),
        "mean",
        lambda x: float(np.mean([part.mean() for part in np.split(x, [10])])),
    ),
    "a correlation without centering": (
        lambda: check_correlation(X + 3, X**2),
        "correlation",
        lambda x, y: float(x @ y / math.sqrt((x @ x) * (y @ y))),
    ),
    "bins that truncate": (
        lambda: check_bars([-0.3, 0.3, 0.7], 8),
        "_bin_index",
        lambda x, e: np.trunc(np.ldexp(x, -e)).astype(np.int64),
    ),
    "the last of equal scores": (
        lambda: check_extremes(SCORES, 2),
        "extreme_rows",
        lambda scores, k: np.argsort(np.nan_to_num(scores, nan=-1))[::-1][:k].tolist(),
    ),
    "the first tokens as a sample": (
        lambda: check_sample(300, 20, 0, 50),
        "hash_index",
        lambda index, seed: index.astype(np.uint64) % 7,
    ),
    "tokens without numbers in the sample": (
        lambda: check_sample(300, 20, 0, 50),
        "drawable",
        lambda columns: np.ones(len(columns["gain"]), dtype=np.bool_),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, function, mistaken = MISTAKES[name]
    check()
    monkeypatch.setattr(tokens, function, mistaken)
    with pytest.raises(AssertionError):
        check()
