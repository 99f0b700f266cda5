"""Curves of `comparison.json`: quantities of every method over its training steps, and the tail of its gradient norms."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.results.checks import check_columns


@dataclass(frozen=True)
class Curve:
    """A quantity over training steps, mean over seeds."""

    step: tuple[int, ...]
    """Last step of each point."""
    value: tuple[float, ...]
    """Mean over the finite steps of each point."""

    def __post_init__(self) -> None:
        check_columns(self, ("step", "value"))


@dataclass(frozen=True)
class NormTail:
    """Pre-clip gradient norms of all steps and seeds, ascending and thinned below the upper tail."""

    norm: tuple[float, ...]
    """‖g‖₂."""
    share: tuple[float, ...]
    """Share of steps with a norm at least as large."""

    def __post_init__(self) -> None:
        check_columns(self, ("norm", "share"))


@dataclass(frozen=True)
class MethodCurves:
    """What the page draws of one method."""

    name: str
    """Name and coefficient."""
    curves: dict[str, Curve]
    """By key of the quantity; the training cross-entropy is always there."""
    norm_tail: NormTail
    """Tail of the gradient norm."""
