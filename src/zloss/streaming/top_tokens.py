"""The k tokens with the largest score, and what is known of each.

Guarantee: exact; any split and merge equals one stream bit for bit, because (score descending, position ascending) is a
total order on tokens of distinct positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from zloss.streaming.accumulator import Accumulator, State, check_size
from zloss.streaming.batch import as_floats, as_integers, flatten, flatten_integers, length, slices
from zloss.streaming.count import Count
from zloss.streaming.table import Schema, Table, concatenate, smallest, take


class TopTokens(Accumulator):
    """A table of the k most extreme tokens, largest score first.

    `position` is the token's index in the whole corpus, distinct for every token: it breaks ties. Tokens with a
    nonfinite score are counted and left out; float columns are kept as they come, NaN included.

    >>> top = TopTokens(2, integers=["target"])
    >>> top.update([1.0, 3.0, 2.0], position=[0, 1, 2], target=[7, 8, 9])
    >>> top.rows()
    [{'score': 3.0, 'position': 1, 'target': 8}, {'score': 2.0, 'position': 2, 'target': 9}]
    """

    def __init__(self, k: int, *, integers: Sequence[str] = (), floats: Sequence[str] = ()) -> None:
        self.k = check_size("k", k, 1)
        self.integers, self.floats = tuple(integers), tuple(floats)
        self._schema = Schema(integers, floats, reserved=("score", "position"))
        self.counts = Count()
        self._table: Table = {"score": np.empty(0), "position": np.empty(0, dtype=np.int64)} | self._schema.empty()

    def update(self, scores: Any, *, position: Any, **columns: Any) -> None:
        """Take tokens with their scores, positions and declared columns."""
        score_flat, position_flat = flatten(scores, "scores"), flatten_integers(position, "position")
        flat = self._schema.flatten(columns)
        for part in slices(length(scores=score_flat, position=position_flat, **flat)):
            score_T = as_floats(score_flat[part])
            keep_T = self.counts.filter(score_T)
            if len(self._table["score"]) == self.k:  # most of a long stream ends here
                high_T = score_T >= self._table["score"][-1]
                keep_T = high_T if keep_T is None else high_T & keep_T
            if keep_T is not None and not keep_T.any():
                continue
            rows = {"score": score_T.astype(np.float64), "position": as_integers(position_flat[part])}
            rows |= self._schema.rows(flat, part)
            self._add(rows if keep_T is None else take(rows, keep_T))

    def table(self) -> Table:
        """Columns score, position and the declared ones, largest score first; empty without tokens."""
        return {name: column.copy() for name, column in self._table.items()}

    def rows(self) -> list[dict[str, int | float]]:
        """The table as one dict of plain numbers per token."""
        names = list(self._table)
        return [
            dict(zip(names, row, strict=True)) for row in zip(*(c.tolist() for c in self._table.values()), strict=True)
        ]

    def merge(self, other: Self) -> Self:
        """Add the tokens of `other`."""
        self._check_mergeable(other, "k", "integers", "floats")
        self.counts.merge(other.counts)
        self._add(other._table)
        return self

    def _add(self, rows: Table) -> None:
        if rows["score"].size:
            rows = concatenate(self._table, rows)
            self._table = take(rows, smallest(-rows["score"], rows["position"], self.k))

    def state_dict(self) -> State:
        state: State = {
            "kind": "TopTokens",
            "k": self.k,
            "integers": np.array(self.integers, dtype=np.str_),
            "floats": np.array(self.floats, dtype=np.str_),
            "counts": self.counts.to_array(),
        }
        return state | {f"column.{name}": column for name, column in self.table().items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        cls._check_kind(state)
        integers, floats = [str(x) for x in state["integers"]], [str(x) for x in state["floats"]]
        top = cls(int(state["k"]), integers=integers, floats=floats)
        top.counts = Count.from_array(state["counts"])
        top._table = {name: np.array(state[f"column.{name}"]) for name in top._table}
        return top
