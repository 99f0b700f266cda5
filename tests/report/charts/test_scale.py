"""Scales and ticks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zloss.report.charts.scale import Scale, linear_scale, log_scale, tick_label

positive = st.floats(1e-9, 1e9)


@given(positive, st.floats(1.001, 1e6), st.booleans())
def test_ticks_are_round_and_inside(low: float, stretch: float, log: bool) -> None:
    scale = Scale(low, low * stretch, log=log)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 12
    assert all(scale.low * (1 - 1e-9) <= tick <= scale.high * (1 + 1e-9) for tick in ticks)
    assert ticks == sorted(set(ticks))


@given(positive, st.floats(1.001, 1e6), st.floats(0, 1), st.booleans())
def test_a_scale_is_increasing_and_meets_its_ends(low: float, stretch: float, at: float, log: bool) -> None:
    scale = Scale(low, low * stretch, 10, 110, log)
    assert scale(scale.low) == pytest.approx(10)
    assert scale(scale.high) == pytest.approx(110)
    middle = low * stretch**at
    assert 10 - 1e-6 <= scale(middle) <= 110 + 1e-6
    if log:
        assert scale(middle) == pytest.approx(10 + 100 * at, abs=1e-4)


def test_scales_of_degenerate_samples_still_have_a_width() -> None:
    for scale in (linear_scale([3.0, 3.0]), linear_scale([0.0]), linear_scale([]), log_scale([2.0]), log_scale([])):
        assert scale.high > scale.low
        assert math.isfinite(scale(scale.low))


def test_tick_labels_are_short() -> None:
    assert [tick_label(v) for v in (0.0, 0.1, 10.0, 1000.0, 1e-4, 2e-5, -2.0, 0.30000000000000004)] == [
        "0",
        "0.1",
        "10",
        "1,000",
        "10⁻⁴",
        "2×10⁻⁵",
        "-2",
        "0.3",
    ]
