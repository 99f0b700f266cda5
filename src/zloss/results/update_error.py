"""The error that an implementation makes in the parameter update, as the decision map reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateError:
    """Δ_θ of one implementation: ‖ĝ − g‖_F / ‖g‖_F of its parameter gradient against the reference."""

    name: str
    """The implementation, with its storage."""
    delta_theta: float
    """Δ_θ (paper eq:backward_deltas)."""
