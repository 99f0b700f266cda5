"""The checkpoints of a run line by line, and the movements that are worth a line."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.decide.drift.watched import SHIFT_KEYS
from zloss.report.text.numbers import number
from zloss.results.drift import Drift, Movement
from zloss.results.quantities import symbol

COLUMNS: tuple[tuple[str, str], ...] = (
    # coordinate, key
    ("raw", "mu_abs_99"),
    ("raw", "mu_rms"),
    ("raw", "p_z_999"),
    ("centered", "p_z_999"),
    ("raw", "a_p_99"),
    ("centered", "a_p_99"),
    ("raw", "sigma_1"),
    ("centered", "sigma_1"),
    ("raw", "e_1"),
    ("centered", "e_1"),
    ("raw", "r_z"),
    ("centered", "r_z"),
)
NARROW = COLUMNS[:1] + COLUMNS[2:6] + COLUMNS[10:11]
"""What a terminal of 80 columns holds beside step, PPL and ΔCE."""
STATES = {"invisible": "CE cannot see it", "with_ce": "while CE moved", "quiet": "did not move", "open": "not judged"}


@dataclass(frozen=True)
class DriftLine:
    """One checkpoint: texts and values of its cells."""

    name: str
    step: int
    cells: tuple[tuple[str, float | None], ...]
    """(text, value) of PPL, ΔCE and every column."""


def drift_titles(columns: tuple[tuple[str, str], ...] = COLUMNS) -> list[str]:
    """Titles of the cells, the coordinate behind a symbol that has two."""
    return [
        "PPL",
        "ΔCE",
        *(symbol(key) if key in SHIFT_KEYS else f"{symbol(key)} {coordinate}" for coordinate, key in columns),
    ]


def drift_lines(drift: Drift, columns: tuple[tuple[str, str], ...] = COLUMNS, digits: int = 4) -> list[DriftLine]:
    """A line per checkpoint; ΔCE is from the checkpoint before."""
    lines = []
    for i, checkpoint in enumerate(drift.checkpoints):
        change = drift.ce_changes[i - 1] if i else None
        gap = None if change is None else change.difference
        values = [getattr(getattr(checkpoint, coordinate), key) for coordinate, key in columns]
        cells = ((number(checkpoint.ppl, digits), checkpoint.ppl), ("" if i == 0 else _signed(gap), gap))
        lines.append(
            DriftLine(checkpoint.name, checkpoint.step, (*cells, *((number(value, digits), value) for value in values)))
        )
    return lines


def movement_name(movement: Movement) -> str:
    """Symbol and coordinate."""
    if movement.quantity in SHIFT_KEYS:
        return symbol(movement.quantity)
    return f"{symbol(movement.quantity)}, {movement.coordinate}"


def _signed(value: float | None) -> str:
    """A change of CE in nats, 0 where it is below 1e-4."""
    if value is None:
        return number(None)
    return "0" if abs(value) < 1e-4 else f"{value:+.2g}"
