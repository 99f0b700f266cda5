"""`zloss.logprob_gap`: the numbers of a gap against plain numpy, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import zloss
from zloss.errors import InputError, ZlossError


def test_every_number_is_that_of_numpy() -> None:
    g = np.random.default_rng(0)
    trainer = -g.exponential(2.0, (5, 40)) - 0.2
    sampler = np.minimum(trainer + g.normal(0.002, 0.03, trainer.shape), 0)
    mask = g.random(trainer.shape) < 0.8
    mask[3] = False  # a sequence without a token that counts
    delta = (trainer - sampler)[mask]
    gap = zloss.logprob_gap(torch.tensor(trainer), sampler, mask.tolist())
    assert (gap.tokens, gap.nonfinite) == (mask.sum(), 0)
    assert gap.rms == pytest.approx(math.sqrt((delta**2).mean()), rel=1e-12)
    assert gap.p99_abs == pytest.approx(np.quantile(abs(delta), 0.99), rel=1e-12)
    assert gap.mean == pytest.approx(delta.mean(), rel=1e-12)
    assert gap.mean_se == pytest.approx(delta.std(ddof=1) / math.sqrt(len(delta)), rel=1e-12)
    ratio = np.exp(delta)
    assert gap.outside_tight == pytest.approx(((ratio < 0.999) | (ratio > 1.002)).mean())
    assert gap.outside_1 == pytest.approx((abs(ratio - 1) > 0.01).mean())
    assert gap.outside_5 == pytest.approx((abs(ratio - 1) > 0.05).mean())
    assert 0 < gap.outside_5 < gap.outside_1 < gap.outside_tight < 1
    sums = np.where(mask, trainer - sampler, 0).sum(1)
    assert gap.sequence_sums == pytest.approx(sums)
    assert gap.sequence_tokens == tuple(mask.sum(1))
    assert gap.sequence_means[3] is None
    assert gap.sequence_means[0] == pytest.approx(sums[0] / mask[0].sum())
    assert str(gap.tokens) in str(gap)


def test_one_sequence_and_16_bit_tensors() -> None:
    gap = zloss.logprob_gap(torch.tensor([-1.0, -2.0], dtype=torch.bfloat16), torch.tensor([-1.0, -2.25]))
    assert gap.sequence_sums == (0.25,)  # trainer − sampler
    assert gap.rms == pytest.approx(math.sqrt(0.25**2 / 2))


def test_tokens_without_a_finite_gap_are_counted_and_left_out() -> None:
    gap = zloss.logprob_gap([-1.0, -math.inf, math.nan], [-1.1, -2.0, -3.0])
    assert (gap.tokens, gap.nonfinite) == (1, 2)
    assert gap.rms == pytest.approx(0.1)
    assert gap.mean_se is None
    assert "2 tokens" in str(gap)
    nothing = zloss.logprob_gap([-1.0], [-1.0], [False])
    assert (nothing.tokens, nothing.rms, nothing.outside_1) == (0, None, None)
    assert "no token" in str(nothing)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (([-1.0, -2.0], [-1.0]), "shape of `trainer_logprobs`"),
        (([-1, -2], [-1.0, -2.0]), "floats"),
        (([-1.0], [-1.0], [0.5]), "booleans"),
        (([-1.0], [-1.0], [True, False]), "booleans"),
        (([-1.0], [-1.0], [2]), "booleans"),
        (([0.4, 1.2], [-0.4, -1.2]), "not log-probabilities"),
        (([[-1.0], [-1.0, -2.0]], [[-1.0], [-1.0]]), "pad sequences"),
        (("a", [-1.0]), "a tensor, an array or a list"),
    ],
)
def test_a_mistake_is_one_sentence(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ZlossError, match=said) as caught:
        zloss.logprob_gap(*given)
    assert isinstance(caught.value, InputError | ValueError | TypeError)
