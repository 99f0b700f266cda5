"""The verdict on a method: rejected where a part fails, accepted where all hold, else inconclusive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zloss.decide.verdicts.part import VerdictPart

Name = Literal["accepted", "rejected", "inconclusive"]
ORDER = ("quality", "coordinate", "optimizer")


@dataclass(frozen=True)
class Verdict:
    """The verdict and its parts, which are shown apart."""

    name: Name
    parts: Mapping[str, VerdictPart]
    reasons: tuple[str, ...]

    @property
    def accepted(self) -> bool | None:
        """True, False, or None for an inconclusive verdict."""
        return {"accepted": True, "rejected": False, "inconclusive": None}[self.name]


def join_parts(parts: Mapping[str, VerdictPart]) -> Verdict:
    """Any part that fails rejects; all must hold to accept; the reasons are those of the parts that decided."""
    states = {part.state for part in parts.values()}
    name: Name = "rejected" if "fails" in states else "accepted" if states == {"holds"} else "inconclusive"
    deciding = {"rejected": "fails", "accepted": "holds", "inconclusive": "open"}[name]
    reasons = tuple(f"{key}: {parts[key].reason}" for key in ORDER if key in parts and parts[key].state == deciding)
    return Verdict(name, dict(parts), reasons)
