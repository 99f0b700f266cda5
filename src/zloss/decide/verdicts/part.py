"""The state of a part from an interval and a bound."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.results.verdict import State, VerdictPart


def against_bound(lower: float | None, upper: float | None, bound: float) -> State:
    """Two one-sided tests: below the bound holds, above it fails, across it (or unknown) is open."""
    if lower is None or upper is None:
        return "open"
    return "holds" if upper <= bound else "fails" if lower > bound else "open"


def all_must_hold(parts: Sequence[VerdictPart]) -> VerdictPart:
    """One part of several questions: it fails where one fails, and holds where all hold.

    Numbers and interval are those of the first question with the joint state; `questions` has the numbers of all.
    """
    if len(parts) == 1:
        return parts[0]
    states = {part.state for part in parts}
    state: State = "fails" if "fails" in states else "open" if "open" in states else "holds"
    first = next(part for part in parts if part.state == state)
    reason = " ".join(part.reason for part in parts if state == "holds" or part.state == state)
    return VerdictPart(state, reason, {**first.numbers, "questions": [part.numbers for part in parts]}, first.interval)
