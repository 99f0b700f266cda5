"""Streams that break careless statistics, and ways to cut them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st


def shaped(name: str, size: int, rng: np.random.Generator) -> np.ndarray:
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
def streams(draw: st.DrawFn, max_size: int = 400) -> np.ndarray:
    """fp32 or fp64 values of a hostile shape, with or without NaN and ±Inf among them; possibly empty."""
    size = draw(st.one_of(st.integers(0, 3), st.integers(0, max_size)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = shaped(draw(st.sampled_from(SHAPES)), size, rng)
    share = draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]))
    bad = rng.random(size) < share
    x = np.where(bad, rng.choice([np.nan, np.inf, -np.inf], size), x)
    return x.astype(draw(st.sampled_from([np.float32, np.float64])))


@dataclass(frozen=True)
class Split:
    """Where to cut a stream and how to put the parts together again."""

    cuts: tuple[float, ...] = (0.5,)
    tree: bool = False
    backwards: bool = False

    def parts(self, size: int) -> list[slice]:
        borders = [0, *sorted(int(cut * size) for cut in self.cuts), size]
        return [slice(a, b) for a, b in itertools.pairwise(borders)]


splits = st.builds(
    Split,
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=6).map(tuple),
    tree=st.booleans(),
    backwards=st.booleans(),
)
