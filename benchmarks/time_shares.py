"""Where the wall-clock time of a chunked head loss goes: its three products, the row pass, casts, and the rest.

The functions that do these things are replaced by timed ones for the length of a block. Time inside a timed function that
another timed function takes is counted once, under the inner name.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zloss.head import chunked, rows
from zloss.head.products import HeadProducts

CASTS, ROWS = "casts", "row pass"


class Stopwatch:
    """Seconds by name, each without what is timed inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = [0.0]

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        self._inside.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.seconds[name] += took - self._inside.pop()
            self._inside[-1] += took

    def wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, timed under that name."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.timed(name):
                return function(*args, **kwargs)

        return call


@contextmanager
def time_shares() -> Iterator[dict[str, float]]:
    """Seconds spent inside the block, by name; what is in no name is the caller's to subtract."""
    watch = Stopwatch()
    places: tuple[tuple[Any, str, str], ...] = (
        (HeadProducts, "logits_", "h Wᵀ"),
        (HeadProducts, "back_project", "E W"),
        (HeadProducts, "add_outer_", "Eᵀ(s∘h)"),
        (HeadProducts, "_convert", CASTS),
        (chunked, "narrow", CASTS),
        (rows.TorchRows, "statistics", ROWS),
    )
    kept = [getattr(owner, attribute) for owner, attribute, _ in places]
    try:
        for (owner, attribute, name), function in zip(places, kept, strict=True):
            setattr(owner, attribute, watch.wrapped(function, name))
        yield watch.seconds
    finally:
        for (owner, attribute, _), function in zip(places, kept, strict=True):
            setattr(owner, attribute, function)
