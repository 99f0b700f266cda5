"""Columns that break careless statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Array = NDArray[Any]


def shaped(name: str, size: int, rng: np.random.Generator) -> Array:
    normal = rng.standard_normal(size)
    return {
        "constant": np.full(size, 0.1),
        "normal": normal,
        "shifted": 1e8 + normal,
        "heavy tail": np.exp(8 * normal),
        "signed heavy tail": np.sign(normal) * np.exp(8 * np.abs(normal)),
        "sorted": np.sort(normal),
        "reversed": np.sort(normal)[::-1],
        "duplicates": rng.integers(-2, 3, size).astype(np.float64),
        "signed zeros": np.where(normal > 0, 0.0, -0.0),
        "subnormal": normal * 1e-39,
        "one outlier": np.where(np.arange(size) == size // 2, 3e30, normal),
    }[name]


SHAPES = [
    "constant", "normal", "shifted", "heavy tail", "signed heavy tail", "sorted", "reversed", "duplicates",
    "signed zeros", "subnormal", "one outlier",
]  # fmt: skip


@st.composite
def columns(draw: st.DrawFn, max_size: int = 400) -> Array:
    """fp32 or fp64 values of a hostile shape, with or without NaN and ±Inf among them; possibly empty."""
    size = draw(st.one_of(st.integers(0, 3), st.integers(0, max_size)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = shaped(draw(st.sampled_from(SHAPES)), size, rng)
    share = draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]))
    bad = rng.random(size) < share
    x = np.where(bad, rng.choice([np.nan, np.inf, -np.inf], size), x)
    return x.astype(draw(st.sampled_from([np.float32, np.float64])))
