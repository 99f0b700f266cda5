"""A uniform subsample of a stream, for scatter plots.

Guarantee: holds the (at most) n items whose hashed index is smallest, so it is deterministic and any split and merge
equals one stream bit for bit; as the hash mixes all bits of the index, every item is as likely to be held as any other,
whatever its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zloss.streaming.accumulator import Accumulator, State, check_size
from zloss.streaming.batch import as_integers, flatten_integers, length, slices
from zloss.streaming.count import Count
from zloss.streaming.table import Schema, Table, concatenate, smallest, take


def hash_index(index_T: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64's output for counter `index` and start `seed`: a bijection of 64-bit words, so keys never tie."""
    x_T = index_T.astype(np.uint64) + np.uint64(seed % 2**64)
    x_T = (x_T + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x_T = (x_T ^ (x_T >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_T = (x_T ^ (x_T >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x_T ^ (x_T >> np.uint64(31)))


class HashSample(Accumulator):
    """At most `limit` items with their columns; `index` is the item's place in the whole stream, distinct for every item.

    `vectors` are names and widths of columns that hold a vector per item, in fp32: limit·width·4 bytes each.
    Items with a nonfinite float or vector are counted and left out: they have no place in a plot.
    """

    def __init__(
        self,
        limit: int,
        *,
        floats: Sequence[str],
        integers: Sequence[str] = (),
        vectors: Mapping[str, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.limit = check_size("limit", limit, 1)
        self.seed = int(seed)
        self.integers, self.floats = tuple(integers), tuple(floats)
        self._schema = Schema(integers, floats, reserved=("index",), vectors=vectors)
        self.vectors = self._schema.vectors
        self.counts = Count()
        self._table: Table = {"index": np.empty(0, dtype=np.int64)} | self._schema.empty()
        self._last_key: np.uint64 | None = None

    def update(self, index: Any, **columns: Any) -> None:
        """Take items with their indices and declared columns."""
        index_flat, flat = flatten_integers(index, "index"), self._schema.flatten(columns)
        for part in slices(length(index=index_flat, **flat)):
            rows: Table = {"index": as_integers(index_flat[part])} | self._schema.rows(flat, part)
            # The largest and the smallest entry of a vector tell of every nonfinite one.
            ends = [end for name in self.vectors for end in (rows[name].max(axis=1), rows[name].min(axis=1))]
            keep_T = self.counts.filter(rows["index"], *(rows[name] for name in self.floats), *ends)
            if self._last_key is not None:
                low_T = hash_index(rows["index"], self.seed) < self._last_key
                keep_T = low_T if keep_T is None else low_T & keep_T
            self._add(rows if keep_T is None else take(rows, keep_T))

    @property
    def fraction(self) -> float | None:
        """Items held over finite items seen; None without items."""
        return len(self._table["index"]) / self.counts.finite if self.counts.finite else None

    def table(self) -> Table:
        """Columns index and the declared ones, by ascending index; empty without items."""
        return take(self._table, np.argsort(self._table["index"]))

    def merge(self, other: Self) -> Self:
        """Add the items of `other`."""
        self._check_mergeable(other, "limit", "seed", "integers", "floats", "vectors")
        self.counts.merge(other.counts)
        self._add(other._table)
        return self

    def _add(self, rows: Table) -> None:
        if rows["index"].size:
            rows = concatenate(self._table, rows)
            key_T = hash_index(rows["index"], self.seed)
            chosen = smallest(key_T, rows["index"], self.limit)
            self._table = take(rows, chosen)
            self._last_key = key_T[chosen[-1]] if chosen.size == self.limit else None

    def state_dict(self) -> State:
        state: State = {
            "kind": "HashSample",
            "limit": self.limit,
            "seed": self.seed,
            "integers": np.array(self.integers, dtype=np.str_),
            "floats": np.array(self.floats, dtype=np.str_),
            "vectors": np.array(list(self.vectors), dtype=np.str_),
            "widths": np.array(list(self.vectors.values()), dtype=np.int64),
            "counts": self.counts.to_array(),
        }
        return state | {f"column.{name}": column for name, column in self.table().items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        cls._check_kind(state)
        integers, floats = [str(x) for x in state["integers"]], [str(x) for x in state["floats"]]
        vectors = {str(name): int(width) for name, width in zip(state["vectors"], state["widths"], strict=True)}
        seed = int(state["seed"])
        sample = cls(int(state["limit"]), floats=floats, integers=integers, vectors=vectors, seed=seed)
        sample.counts = Count.from_array(state["counts"])
        sample._add({name: np.array(state[f"column.{name}"]) for name in sample._table})
        return sample
