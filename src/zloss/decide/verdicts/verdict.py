"""The verdict on a method: rejected where a part fails, accepted where all hold, else inconclusive."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zloss.results.quality import QualityVerdict
from zloss.results.verdict import VerdictName, VerdictParts

ALL = 3
"""Parts that must hold for an accepted method."""


@dataclass(frozen=True)
class Verdict:
    """The verdict and its parts, which are shown apart."""

    name: VerdictName
    parts: VerdictParts
    reasons: tuple[str, ...]
    """The sentences of the parts that decided."""

    @property
    def accepted(self) -> bool | None:
        """True, False, or None for an inconclusive verdict."""
        return {"accepted": True, "rejected": False, "inconclusive": None}[self.name]


def join_parts(parts: VerdictParts) -> Verdict:
    """Any part that fails rejects; all three must hold to accept; the reasons are those of the parts that decided."""
    named = parts.named()
    states = {part.state for _, part in named}
    complete = len(named) == ALL
    name: VerdictName = (
        "rejected" if "fails" in states else "accepted" if states == {"holds"} and complete else "inconclusive"
    )
    deciding = {"rejected": "fails", "accepted": "holds", "inconclusive": "open"}[name]
    reasons = tuple(f"{key}: {part.reason}" for key, part in named if part.state == deciding)
    return Verdict(name, parts, reasons)


def with_verdict(stated: QualityVerdict, parts: VerdictParts) -> QualityVerdict:
    """`stated` with the verdict that follows from `parts`, and its reasons."""
    verdict = join_parts(parts)
    return replace(
        stated,
        accepted=verdict.accepted,
        reason=" ".join(verdict.reasons),
        verdict=verdict.name,
        reasons=verdict.reasons,
        parts=parts,
    )
