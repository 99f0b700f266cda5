"""Summaries of tokens: numpy's numbers by name, ignored tokens left out, one transfer to the host."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import zloss
from zloss.statistics import summarize


def loss_of(seed: int = 0, tokens: int = 500, **options: object) -> zloss.HeadLossOutput:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(tokens, 8, generator=g), torch.randn(61, 8, generator=g) + 0.3
    target = torch.randint(61, (tokens,), generator=g)
    target[::3] = -100
    return zloss.head_loss(hidden.double(), weight.double(), target, zloss.CrossEntropy(), **options)


def test_numbers_equal_numpy_on_the_valid_tokens() -> None:
    out = loss_of()
    stats, found = out.stats, out.stats.summary()
    valid = stats.valid.numpy()
    quantities = {
        ("log_z_{}", "p"): stats.log_z,
        ("p_z_{}_raw", ""): (stats.log_z - math.log(61)).abs(),
        ("p_z_{}_centered", ""): (stats.log_z - stats.mu - math.log(61)).abs(),
        ("mu_abs_{}", "p"): stats.mu.abs(),
        ("gain_{}", "p"): stats.gain,
        ("gain_centered_{}", "p"): stats.gain_centered,
    }
    expected = {"tokens": float(valid.sum()), "ce": float(out.loss)}
    expected["entropy"] = float(stats.entropy[stats.valid].mean())
    expected["accuracy"] = float(stats.top1[stats.valid].double().mean())
    for (name, prefix), values in quantities.items():
        kept = values.numpy()[valid]
        expected[name.format("mean")] = kept.mean()
        expected[name.format(f"{prefix}99")] = np.quantile(kept, 0.99)
        expected[name.format(f"{prefix}999")] = np.quantile(kept, 0.999)
        expected[name.format("max")] = kept.max()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert type(found[name]) is float
        assert found[name] == pytest.approx(value, rel=1e-12), name


def test_parts_equal_the_whole() -> None:
    whole, parts = loss_of(tokens=300).stats, []
    for tokens in (slice(0, 100), slice(100, 101), slice(101, 300)):
        names = ("row_max", "log_s", "target_logit", "valid", "mu", "gain", "gain_centered", "entropy")
        parts.append(zloss.TokenStats(vocab=61, **{name: getattr(whole, name)[tokens] for name in names}))
    found = summarize(parts)
    assert found == pytest.approx(whole.summary(), rel=1e-12)


def test_what_does_not_exist_has_no_entry() -> None:
    capped = loss_of(softcap=5.0).stats.summary()
    assert "p_z_999_raw" in capped
    assert not {"mu_abs_p99", "p_z_999_centered", "gain_centered_p99"} & capped.keys()
    light = loss_of(statistics="light").stats.summary()
    assert not {"gain_p99", "entropy", "mu_abs_p99"} & light.keys()


def test_no_valid_token() -> None:
    out = zloss.head_loss(torch.randn(4, 3), torch.randn(5, 3), torch.full((4,), -100), zloss.CrossEntropy())
    assert out.stats.summary() == {"tokens": 0.0}


def test_a_nonfinite_token_shows_in_the_mean_and_the_maximum() -> None:
    stats = loss_of().stats
    stats.gain[1] = torch.inf
    assert stats.summary()["gain_max"] == math.inf
    stats.gain[1] = torch.nan
    assert math.isnan(stats.summary()["gain_max"])
    # The mean once counted it as 0, and stayed finite.
    assert math.isnan(stats.summary()["gain_mean"])
    assert math.isfinite(stats.summary()["log_z_mean"])


def test_one_transfer_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stats, reads = loss_of().stats, []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, own=own, name=name: (reads.append(name), own(self))[1])
    stats.summary()
    assert reads == ["tolist"]
