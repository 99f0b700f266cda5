"""The verdict on a compared method, as comparison.json holds it: a name and the three parts it follows from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["holds", "fails", "open"]
VerdictName = Literal["accepted", "rejected", "inconclusive"]


@dataclass(frozen=True)
class Interval:
    """Two one-sided 95 % bounds of a difference or ratio between method and baseline."""

    lower: float
    """Lower bound."""
    upper: float
    """Upper bound."""
    unit: str
    """ "nats per token", or "ratio"."""


@dataclass(frozen=True)
class VerdictPart:
    """Quality, the diagnosed coordinate, or the optimizer-facing endpoints of one method."""

    state: State
    """Whether the part holds; "open" where the runs do not decide."""
    reason: str
    """One sentence; for an open part, what would settle it."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What the sentence rests on, by name."""
    interval: Interval | None = None
    """The interval of the difference; None where there is none, as with one seed."""


@dataclass(frozen=True)
class VerdictParts:
    """The parts of a verdict, which are shown apart; a part that does not apply to a method is None."""

    coordinate: VerdictPart | None = None
    """Does the method lower the quantity that it is meant to lower?"""
    quality: VerdictPart | None = None
    """Is the validation cross-entropy within the tolerance?"""
    optimizer: VerdictPart | None = None
    """Are the gradients and states that the optimizer sees no worse?"""

    def named(self) -> tuple[tuple[str, VerdictPart], ...]:
        """(name, part) of every part that applies, quality first."""
        parts = (("quality", self.quality), ("coordinate", self.coordinate), ("optimizer", self.optimizer))
        return tuple((name, part) for name, part in parts if part is not None)
