"""Columns that break careless statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Array = NDArray[Any]


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
def columns(draw: st.DrawFn, max_size: int = 400) -> Array:
    """fp32 or fp64 values of a hostile shape, with or without NaN and ±Inf among them; possibly empty."""
    size = draw(st.one_of(st.integers(0, 3), st.integers(0, max_size)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = shaped(draw(st.sampled_from(list(SHAPES))), size, rng)
    share = draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]))
    bad = rng.random(size) < share
    x = np.where(bad, rng.choice([np.nan, np.inf, -np.inf], size), x)
    return x.astype(draw(st.sampled_from([np.float32, np.float64])))
