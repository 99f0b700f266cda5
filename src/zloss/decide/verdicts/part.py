"""One part of a verdict: what was asked, its state, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["holds", "fails", "open"]


@dataclass(frozen=True)
class VerdictPart:
    """Quality, the diagnosed coordinate, or the optimizer-facing endpoints of one method."""

    state: State
    reason: str
    """One sentence; for an open part, what would settle it."""
    numbers: dict[str, float | int | str | None] = field(default_factory=dict)


def against_bound(lower: float | None, upper: float | None, bound: float) -> State:
    """Two one-sided tests: below the bound holds, above it fails, across it (or unknown) is open."""
    if lower is None or upper is None:
        return "open"
    return "holds" if upper <= bound else "fails" if lower > bound else "open"
