"""Columns of equal length, kept beside a selection of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloss.errors import InputError, ShapeError
from zloss.streaming.batch import Flat, as_floats, as_integers, flatten, flatten_integers

Table = dict[str, NDArray[Any]]


class Schema:
    """Names of the integer columns (int64) and float columns (fp64) of a table.

    `vectors` are names and widths of columns that hold a vector (fp32) per row.
    """

    def __init__(
        self,
        integers: Sequence[str],
        floats: Sequence[str],
        reserved: Sequence[str] = (),
        vectors: Mapping[str, int] | None = None,
    ) -> None:
        self.integers, self.floats, self.vectors = tuple(integers), tuple(floats), dict(vectors or {})
        names = [*reserved, *self.integers, *self.floats, *self.vectors]
        if len(set(names)) != len(names):
            raise InputError(f"column names are expected to differ, also from {list(reserved)}, but got {names}.")

    def empty(self) -> Table:
        """The table without rows."""
        columns: Table = {name: np.empty(0, dtype=np.int64) for name in self.integers}
        columns |= {name: np.empty(0, dtype=np.float64) for name in self.floats}
        return columns | {name: np.empty((0, width), dtype=np.float32) for name, width in self.vectors.items()}

    def flatten(self, columns: Mapping[str, Any]) -> dict[str, Flat]:
        """The given columns as flat batches in the declared order; missing or further ones are refused."""
        expected = [*self.integers, *self.floats, *self.vectors]
        if set(columns) != set(expected):
            raise InputError(f"the columns are expected to be {expected}, but got {list(columns)}.")
        integers = {name: flatten_integers(columns[name], name) for name in self.integers}
        floats = {name: flatten(columns[name], name) for name in self.floats}
        return integers | floats | {name: self._flat_vectors(name, columns[name]) for name in self.vectors}

    def rows(self, flat: Mapping[str, Flat], part: slice) -> Table:
        """The rows of one slice, converted to the declared types."""
        columns: Table = {name: as_integers(flat[name][part]) for name in self.integers}
        columns |= {name: as_floats(flat[name][part]).astype(np.float64) for name in self.floats}
        with np.errstate(over="ignore"):  # beyond fp32 a number is infinite
            vectors: Table = {name: as_floats(flat[name][part]).astype(np.float32, copy=False) for name in self.vectors}
        return columns | vectors

    def _flat_vectors(self, name: str, values: Any) -> Flat:
        """One vector per row, [rows, width]."""
        width, shape = self.vectors[name], tuple(np.shape(values))
        if not shape or shape[-1] != width:
            raise ShapeError(f"`{name}` is expected to be [..., {width}], but got {list(shape)}.")
        return flatten(values, name).reshape(-1, width)


def take(table: Table, index: NDArray[Any]) -> Table:
    """The rows at `index` (positions or a mask)."""
    return {name: column[index] for name, column in table.items()}


def concatenate(a: Table, b: Table) -> Table:
    """The rows of `a`, then those of `b`."""
    return {name: np.concatenate([a[name], b[name]]) for name in a}


def smallest(key: NDArray[Any], tie: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """Positions of the k smallest keys, the smaller `tie` first among equal keys, in that order."""
    index = np.arange(key.size)
    if key.size > k:
        border = np.partition(key, k - 1)[k - 1]
        inside, level = np.flatnonzero(key < border), np.flatnonzero(key == border)
        room = k - inside.size
        if level.size > room:  # a constant stream is all ties: partition these as well, sort only what stays
            level = level[np.argpartition(tie[level], room - 1)[:room]]
        index = np.concatenate([inside, level])
    return np.asarray(index[np.lexsort((tie[index], key[index]))], dtype=np.int64)
