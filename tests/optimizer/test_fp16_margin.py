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
    assert not overflows(FP16_MAX / 4096, 4096)  # strict
    assert overflows(math.nextafter(FP16_MAX / 4096, math.inf), 4096)


@pytest.mark.parametrize(
    ("grad_infs", "kappa_max", "psi"),
    [
        ([1.0, 10.0, 100.0, 5.0], (65504.0, 6550.4, 655.04, 13100.8), {256: 0.0, 4096: 0.25, 16384: 0.75}),
        ([1.0, math.nan], (65504.0, 0.0), {256: 0.5, 4096: 0.5, 16384: 0.5}),
        ([1.0, math.inf], (65504.0, 0.0), {256: 0.5, 4096: 0.5, 16384: 0.5}),
        ([0.0], (math.inf,), {256: 0.0, 4096: 0.0, 16384: 0.0}),
    ],
    ids=["finite", "NaN overflows at every scale", "infinity too", "a zero gradient leaves all room"],
)
def test_margin_over_batches(grad_infs: list[float], kappa_max: tuple[float, ...], psi: dict[int, float]) -> None:
    assert tuple(map(max_safe_scale, grad_infs)) == kappa_max
    share = {f"psi_{scale}": value for scale, value in psi.items()}
    assert fp16_margin(grad_infs, scales=(256, 4096, 16384)) == (min(kappa_max), share)


def test_no_batches_is_an_error() -> None:
    with pytest.raises(InputError, match="at least one batch"):
        fp16_margin([], scales=(256,))
