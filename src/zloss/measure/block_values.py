"""Values of validation tokens by block: mean cross-entropy, means of squares, and the largest values of each quantity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from zloss.measure.token_table import TokensInCoordinate, TokenTable
from zloss.results.coordinate import Coordinate
from zloss.results.validation_blocks import (
    DELTA_U,
    DELTA_U_GAIN_AWARE,
    GAIN,
    SHIFT,
    SHIFT_SQUARED,
    VIOLATION,
    VIOLATION_SQUARED,
    ValidationBlocks,
    kept_values,
)

Floats = NDArray[np.float64]
Read = Callable[[TokensInCoordinate], Tensor | None]
TAILS: dict[str, Read] = {
    VIOLATION: lambda tokens: tokens.violation,
    SHIFT: lambda tokens: None if tokens.mu is None else tokens.mu.abs(),
    DELTA_U: lambda tokens: tokens.delta_u,
    DELTA_U_GAIN_AWARE: lambda tokens: tokens.delta_u_gain_aware,
}
DRIFT_TAILS: dict[str, Read] = {
    VIOLATION: TAILS[VIOLATION],
    SHIFT: TAILS[SHIFT],
    GAIN: lambda tokens: tokens.gain,
}
"""What checkpoints of one run are compared by."""
MEANS: dict[str, Read] = {
    SHIFT_SQUARED: lambda tokens: None if tokens.mu is None else tokens.mu.double() ** 2,
    VIOLATION_SQUARED: lambda tokens: tokens.violation.double() ** 2,
}
DIGITS = 7
"""Significant digits of a kept value; the values are fp32."""


class BlockValues:
    """Sums and largest values of the tokens seen, by block of `size` tokens; `tails` are the quantities whose largest
    values are kept."""

    def __init__(self, blocks: int, size: int, tails: Mapping[str, Read] = TAILS) -> None:
        self.blocks, self.size, self.tails = blocks, size, tails
        self._kept = kept_values(blocks * size)
        self._tokens = np.zeros(blocks, dtype=np.int64)
        self._ce = np.zeros(blocks)
        self._sums: dict[str, Floats] = {}
        self._largest: dict[str, _Largest] = {}

    def update(self, table: TokenTable, first_position: int) -> None:
        """Take a chunk whose first token has this index in the whole text."""
        block_T = np.arange(first_position, first_position + len(table.ce)) // self.size
        self._tokens += np.bincount(block_T, minlength=self.blocks)
        self._ce += self._by_block(table.ce, block_T)
        coordinates: tuple[tuple[Coordinate, TokensInCoordinate | None], ...] = (
            ("raw", table.raw),
            ("centered", table.centered),
        )
        for coordinate, tokens in coordinates:
            if tokens is None:
                continue
            for name, read in MEANS.items():
                # The squares of the centered residual are rounding noise.
                if (name, coordinate) != (SHIFT_SQUARED, "centered") and (column := read(tokens)) is not None:
                    sums = self._sums.setdefault(f"{name}.{coordinate}", np.zeros(self.blocks))
                    sums += self._by_block(column, block_T)
            for name, read in self.tails.items():
                if (column := read(tokens)) is not None:
                    largest = self._largest.setdefault(f"{name}.{coordinate}", _Largest(self._kept))
                    largest.update(_numbers(column), block_T)

    def state(self) -> dict[str, Any]:
        """What `merge` takes: arrays by name."""
        largest = {name: (each.values, each.blocks) for name, each in self._largest.items()}
        return {"tokens": self._tokens, "ce": self._ce, "sums": self._sums, "largest": largest}

    def merge(self, state: dict[str, Any]) -> None:
        """Take in what another pass over other blocks of the same text has seen."""
        self._tokens = self._tokens + state["tokens"]
        self._ce = self._ce + state["ce"]
        for name, sums in state["sums"].items():
            self._sums[name] = self._sums.get(name, 0.0) + sums
        for name, (values, blocks) in state["largest"].items():
            self._largest.setdefault(name, _Largest(self._kept)).update(values, blocks)

    def _by_block(self, column: Tensor, block_T: NDArray[np.int64]) -> Floats:
        return np.bincount(block_T, weights=_numbers(column), minlength=self.blocks).astype(np.float64)

    def record(self) -> ValidationBlocks:
        """What metrics.json holds of them."""
        return ValidationBlocks(
            tokens=tuple(self._tokens.tolist()),
            ce=self._means(self._ce),
            kept=self._kept,
            tails={name: largest.by_block(self.blocks) for name, largest in self._largest.items()},
            means={name: self._means(sums) for name, sums in self._sums.items()},
        )

    def _means(self, sums: Floats) -> tuple[float | None, ...]:
        with np.errstate(divide="ignore", invalid="ignore"):
            means = sums / self._tokens
        return tuple(float(mean) if np.isfinite(mean) else None for mean in means)


class _Largest:
    """The k largest finite values with their blocks."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.values: Floats = np.empty(0)
        self.blocks: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def update(self, values: Floats, blocks: NDArray[np.int64]) -> None:
        finite = np.isfinite(values)
        self.values = np.concatenate([self.values, values[finite]])
        self.blocks = np.concatenate([self.blocks, blocks[finite]])
        if len(self.values) > 2 * self.k:
            self._cut()

    def _cut(self) -> None:
        if len(self.values) > self.k:
            place = np.argpartition(-self.values, self.k - 1)[: self.k]
            self.values, self.blocks = self.values[place], self.blocks[place]

    def by_block(self, blocks: int) -> tuple[tuple[float, ...], ...]:
        self._cut()
        order = np.lexsort((-self.values, self.blocks))
        values, ends = self.values[order], np.cumsum(np.bincount(self.blocks, minlength=blocks))
        rounded = [float(f"{value:.{DIGITS}g}") for value in values]
        starts = np.concatenate([[0], ends[:-1]])
        return tuple(tuple(rounded[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True))


def _numbers(column: Tensor) -> Floats:
    return column.detach().double().cpu().numpy().astype(np.float64)
