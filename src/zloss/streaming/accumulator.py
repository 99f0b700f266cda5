"""What every accumulator can do: take values, take another accumulator, become plain data and come back.

Guarantee: for any split of a stream into parts, `update` on each part and `merge` of the results answers as one
`update` on the whole stream does; each accumulator says whether that holds bit for bit, to fp64 rounding, or within
stated bounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zloss.errors import InputError

State = dict[str, NDArray[Any] | int | float | str]


class Accumulator(ABC):
    """Base of all accumulators.

    `merge` adds its argument to `self` and returns `self`; the argument keeps its value. `state_dict` is a flat dict
    of numbers, strings and numpy arrays that `numpy.savez` stores without pickling, and `from_state_dict` takes it
    back in that form or as loaded (0-d arrays for scalars). An empty accumulator answers `None`, never NaN.
    """

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take a batch of values, given as numbers, numpy arrays or tensors of any float dtype and shape."""

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Add all that `other` has seen, leave `other` alone, return `self`."""

    @abstractmethod
    def state_dict(self) -> State:
        """Everything needed to continue, as plain data."""

    @classmethod
    @abstractmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """The accumulator whose `state_dict` this is."""

    def _check_mergeable(self, other: Self, *settings: str) -> None:
        """Refuse another kind of accumulator, or one with other settings: the result would have no meaning."""
        if type(other) is not type(self):
            raise InputError(
                f"`merge` of {type(self).__name__} takes another {type(self).__name__}, but got {type(other).__name__}."
            )
        for name in settings:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise InputError(
                    f"`merge` needs the same `{name}` on both sides, but got {mine!r} and {theirs!r}: "
                    "build all parts of one stream with the same options."
                )

    @classmethod
    def _check_kind(cls, state: Mapping[str, Any]) -> None:
        """Refuse the state of another kind of accumulator."""
        kind = str(state["kind"]) if "kind" in state else "nothing known (no key 'kind')"
        if kind != cls.__name__:
            raise InputError(f"`state` is expected to be of {cls.__name__}, but it is of {kind}.")


def check_size(name: str, value: int, least: int) -> int:
    """`value` as an int of at least `least`."""
    if int(value) != value or value < least:
        raise InputError(f"`{name}` is expected to be an integer of at least {least}, but got {value!r}.")
    return int(value)


def int_array(values: Any) -> NDArray[np.int64]:
    """An own int64 copy, as states hold it."""
    return np.array(values, dtype=np.int64)
