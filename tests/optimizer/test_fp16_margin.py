"""κ_max, κ_min and Ψ_κ as the paper defines them, on gradients that can be checked by hand and by fp16 itself."""

from __future__ import annotations

import math

import pytest
import torch

from zloss.errors import InputError
from zloss.optimizer.endpoints import FP16_MAX, fp16_margin, max_safe_scale, overflows


def test_the_largest_safe_scale_is_the_last_that_fp16_can_hold() -> None:
    grad_inf = 5.77
    kappa = max_safe_scale(grad_inf)
    assert torch.isfinite(torch.tensor(grad_inf * kappa).half())
    # fp16 rounds up to 65519 down to its maximum; one part in a thousand beyond it is infinite.
    assert torch.isinf(torch.tensor(grad_inf * kappa * 1.001).half())
    assert torch.finfo(torch.float16).max == FP16_MAX


def test_the_inequality_is_strict() -> None:
    assert not overflows(FP16_MAX / 4096, 4096)
    assert overflows(math.nextafter(FP16_MAX / 4096, math.inf), 4096)


def test_fractions_and_the_smallest_scale() -> None:
    margin = fp16_margin([1.0, 10.0, 100.0, 5.0], scales=(256, 4096, 16384))
    assert margin.kappa_max == (65504.0, 6550.4, 655.04, 13100.8)
    assert margin.kappa_min == 655.04
    assert margin.psi == {256: 0.0, 4096: 0.25, 16384: 0.75}
    assert margin.nonfinite == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_an_overflow_at_every_scale(bad: float) -> None:
    margin = fp16_margin([1.0, bad], scales=(1, 256))
    assert margin.psi == {1: 0.5, 256: 0.5}
    assert (margin.kappa_min, margin.nonfinite) == (0.0, 1)


def test_a_zero_gradient_leaves_all_room() -> None:
    assert fp16_margin([0.0]).kappa_min == math.inf


def test_no_batches_is_an_error() -> None:
    with pytest.raises(InputError, match="at least one batch"):
        fp16_margin([])
