"""What each method is meant to lower, and where metrics.json holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zloss.results.coordinate import Coordinate
from zloss.results.validation_blocks import (
    DELTA_U,
    DELTA_U_GAIN_AWARE,
    SHIFT,
    SHIFT_SQUARED,
    VIOLATION,
    VIOLATION_SQUARED,
)

Reference = Literal["baseline", "standard"]
STANDARD = "standard"


@dataclass(frozen=True)
class DiagnosedQuantity:
    """A token quantity of method and reference."""

    name: str
    """As sentences show it."""
    method: str
    """Key of the method's values among the tails or means of `ValidationBlocks`."""
    reference: str
    """Key of the reference's values."""
    quantile: float | None
    """The quantile that is meant; None for a mean."""
    against: Reference = "baseline"
    """The run of the same seed it is compared with: the baseline's, or Standard's at the same λ."""


def diagnosed_quantities(method: str, coordinate: Coordinate, baseline: Coordinate) -> tuple[DiagnosedQuantity, ...]:
    """What `method`, which deploys `coordinate`, has to lower; `baseline` is what the baseline deploys.

    Empty for a method without anything to lower (CE) or with an unknown name.
    """
    if method == "centered-head":
        return (DiagnosedQuantity("|μ|", f"{SHIFT}.{coordinate}", f"{SHIFT}.{baseline}", 0.99),)
    if method in (STANDARD, "centered"):
        name = "|log Z − c|" if coordinate == "raw" else "|log Z̃ − c|"
        return (_both(name, f"{VIOLATION}.{coordinate}", 0.999),)
    if method == "factorized":
        return (
            _both("μ²", f"{SHIFT_SQUARED}.raw", None),
            _both("(log Z̃ − c)²", f"{VIOLATION_SQUARED}.centered", None),
        )
    if method == "gain-aware":
        weighted, plain = f"{DELTA_U_GAIN_AWARE}.raw", f"{DELTA_U}.raw"
        return (DiagnosedQuantity("‖δ_u‖ against Standard", weighted, plain, 0.99, against="standard"),)
    return ()


STATED = {
    "p_z_999": ("|log Z − c|", VIOLATION, 0.999),
    "mu_abs_99": ("|μ|", SHIFT, 0.99),
    "delta_u_99": ("‖δ_u‖", DELTA_U, 0.99),
    "delta_u_99_gain_aware": ("‖δ_u‖, gain-aware", DELTA_U_GAIN_AWARE, 0.99),
    "diag_z": ("(log Z − c)²", VIOLATION_SQUARED, None),
    "mu_rms": ("μ²", SHIFT_SQUARED, None),
}
"""Keys of a head's numbers that can be judged instead of a method's own quantity."""


def stated_quantity(key: str, coordinate: Coordinate) -> DiagnosedQuantity | None:
    """The quantity behind a key of a head's numbers; None where it is not kept block by block."""
    found = STATED.get(key)
    if found is None:
        return None
    name, stem, quantile = found
    return _both(name, f"{stem}.{'raw' if stem == SHIFT_SQUARED else coordinate}", quantile)


def _both(name: str, key: str, quantile: float | None) -> DiagnosedQuantity:
    return DiagnosedQuantity(name, key, key, quantile)
