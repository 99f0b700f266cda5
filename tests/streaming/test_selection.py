"""TopTokens and HashSample against straight definitions over the whole stream."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zloss.streaming.top_tokens
from zloss.errors import InputError, ShapeError
from zloss.streaming import HashSample, TopTokens
from zloss.streaming.hash_sample import hash_index
from zloss.streaming.table import smallest


@settings(max_examples=200, deadline=None)
@given(scores=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), max_size=40), k=st.integers(1, 12), order=st.randoms())
def test_top_tokens_are_the_first_of_the_sorted_stream(scores, k, order):
    position = list(range(len(scores)))
    order.shuffle(position)
    top = TopTokens(k, integers=["target"], floats=["log_z"])
    for start in range(0, len(scores), 7):
        part = slice(start, start + 7)
        target = [p * 3 for p in position[part]]
        top.update(scores[part], position=position[part], target=target, log_z=[-s for s in scores[part]])
    truth = sorted(zip(scores, position, strict=True), key=lambda pair: (-pair[0], pair[1]))[:k]
    assert top.rows() == [{"score": s, "position": p, "target": 3 * p, "log_z": -s} for s, p in truth]


@given(keys=st.lists(st.integers(0, 3), min_size=1, max_size=30), k=st.integers(1, 35))
def test_smallest_is_a_sort_cut_short(keys, k):
    tie = np.arange(len(keys))[::-1]
    truth = sorted(range(len(keys)), key=lambda i: (keys[i], tie[i]))[:k]
    assert smallest(np.array(keys), tie, k).tolist() == truth


def test_a_nonfinite_score_is_counted_and_not_listed_but_a_nan_column_is_kept():
    top = TopTokens(3, floats=["log_z"])
    nan, inf = float("nan"), float("inf")
    top.update(torch.tensor([nan, 2.0, inf, -inf]), position=torch.arange(4), log_z=[0.0, nan, 0.0, 0.0])
    assert top.table()["position"].tolist() == [1]
    assert np.isnan(top.table()["log_z"]).tolist() == [True]
    assert top.counts.to_array().tolist() == [1, 1, 1, 1]


def test_large_positions_are_kept_exactly():
    top = TopTokens(1)
    top.update(torch.tensor([1.0]), position=torch.tensor([2**53 + 1]))
    assert top.rows() == [{"score": 1.0, "position": 2**53 + 1}]


def test_the_example_in_the_docstring_runs():
    result = doctest.testmod(zloss.streaming.top_tokens)
    assert (result.failed, result.attempted > 0) == (0, True)


def test_columns_other_than_the_declared_are_refused():
    top = TopTokens(2, floats=["log_z"])
    for columns in ({}, {"log_z": [1.0], "mu": [1.0]}, {"mu": [1.0]}):
        with pytest.raises(InputError, match=r"expected to be \['log_z'\]"):
            top.update([1.0], position=[0], **columns)
    with pytest.raises(ShapeError, match="'log_z': 2"):
        top.update([1.0], position=[0], log_z=[1.0, 2.0])
    with pytest.raises(InputError, match="expected to differ"):
        TopTokens(2, floats=["score"])


def test_empty_selections_are_empty_tables():
    assert TopTokens(3, integers=["target"]).rows() == []
    sample = HashSample(3, floats=["x"])
    assert (sample.fraction, {n: c.tolist() for n, c in sample.table().items()}) == (None, {"index": [], "x": []})


def sampled(size: int, limit: int, *, seed: int = 0, batch: int = 1000) -> HashSample:
    sample = HashSample(limit, floats=["x"], seed=seed)
    for start in range(0, size, batch):
        index = np.arange(start, min(start + batch, size))
        sample.update(index, x=index * 0.5)
    return sample


def test_a_sample_holds_the_smallest_hashes_with_their_columns():
    sample = sampled(5000, 100)
    truth = np.sort(np.argsort(hash_index(np.arange(5000), 0))[:100])
    assert sample.table()["index"].tolist() == truth.tolist()
    assert sample.table()["x"].tolist() == (truth * 0.5).tolist()
    assert sample.fraction == 100 / 5000


def test_a_stream_shorter_than_the_limit_is_held_whole():
    assert sampled(50, 100).table()["index"].tolist() == list(range(50))


def test_a_sample_is_uniform_over_the_stream():
    held = sampled(200_000, 10_000).table()["index"]
    counts = np.bincount(held // 2000, minlength=100)  # 100 cells of 100 expected items each
    chi_square = float(((counts - 100.0) ** 2 / 100.0).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom: mean 99, standard deviation 14
    assert abs((held % 2).mean() - 0.5) < 0.02


def test_another_seed_is_another_sample():
    one, two = (set(sampled(5000, 500, seed=seed).table()["index"].tolist()) for seed in (0, 1))
    assert 20 < len(one & two) < 90  # 50 by chance


def test_a_hash_never_collides():
    index = np.concatenate([np.arange(100_000), 2**40 + np.arange(100_000)])
    assert np.unique(hash_index(index, 7)).size == index.size


def test_items_with_a_nonfinite_column_are_left_out():
    sample = HashSample(10, floats=["x", "y"])
    nan, inf = float("nan"), float("inf")
    sample.update([0, 1, 2, 3], x=[1.0, nan, -inf, 2.0], y=[1.0, inf, 3.0, 4.0])
    assert sample.table()["index"].tolist() == [0, 3]
    assert sample.counts.to_array().tolist() == [2, 1, 0, 1]


def test_a_sample_keeps_a_vector_per_item():
    sample = HashSample(100, floats=["x"], vectors={"v": 3})
    index = np.arange(1000)
    vectors = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    vectors[:10, 1] = torch.inf
    vectors[10:20, :2] = torch.tensor([torch.nan, -torch.inf])
    vectors[20:25, 2] = -torch.inf
    for part in np.split(index, [1, 400]):
        sample.update(part, x=part * 0.5, v=vectors[part])
    table = sample.table()
    assert table["v"].shape == (100, 3)
    assert np.array_equal(table["v"], vectors.numpy()[table["index"]])
    assert sample.counts.to_array().tolist() == [975, 10, 10, 5]
    assert table["index"].min() >= 25
    with pytest.raises(ShapeError, match=r"\[\.\.\., 3\]"):
        sample.update([0], x=[1.0], v=[[1.0, 2.0]])
