"""Named accumulators as one flat dict, for one file or one message between processes.

Guarantee: `unpack(pack(x))` is `x`, bit for bit, also through `numpy.savez` and `numpy.load` without pickling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zloss.errors import InputError, UnknownNameError
from zloss.streaming.accumulator import Accumulator, State
from zloss.streaming.comoments import CoMoments
from zloss.streaming.count import Count
from zloss.streaming.hash_sample import HashSample
from zloss.streaming.histogram import Histogram
from zloss.streaming.moments import Moments
from zloss.streaming.quantiles import Quantiles
from zloss.streaming.top_tokens import TopTokens

_KINDS: dict[str, type[Accumulator]] = {
    kind.__name__: kind for kind in (CoMoments, Count, HashSample, Histogram, Moments, Quantiles, TopTokens)
}


def pack(accumulators: Mapping[str, Accumulator]) -> State:
    """The states of all accumulators under the keys `name/key`; a name may itself contain slashes."""
    return {f"{name}/{key}": value for name, each in accumulators.items() for key, value in each.state_dict().items()}


def unpack(state: Mapping[str, Any]) -> dict[str, Accumulator]:
    """The accumulators of `pack`, by name and in order."""
    parts: dict[str, dict[str, Any]] = {}
    for path, value in state.items():
        name, slash, key = path.rpartition("/")
        if not slash:
            raise InputError(f"keys of packed accumulators are expected to read `name/key`, but got {path!r}.")
        parts.setdefault(name, {})[key] = value
    return {name: _restore(name, part) for name, part in parts.items()}


def _restore(name: str, state: Mapping[str, Any]) -> Accumulator:
    if "kind" not in state:
        raise InputError(f"the packed accumulator {name!r} has no 'kind', only {sorted(state)}.")
    kind = str(state["kind"])
    if kind not in _KINDS:
        raise UnknownNameError("kind of accumulator", kind, _KINDS)
    return _KINDS[kind].from_state_dict(state)
