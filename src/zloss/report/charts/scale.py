"""Scales of axes: data values to positions, round ticks and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zloss.report.text.numbers import number, superscript

NARROW = 1e-12
"""A linear scale narrower than this share of its values is widened: its ticks would be equal numbers."""
SMALLEST = 1e-300
"""Steps between ticks below this are lost in rounding."""
LARGEST = 1e290
"""Values beyond this are not drawn: differences of two of them may overflow."""
LOWEST_OF_LOGS = 1e-290
"""A logarithmic scale begins here at the lowest: below, a value may be rounded to 0, which has no logarithm."""


@dataclass(frozen=True)
class Scale:
    """Data values `low` … `high` to positions `start` … `end`, linear or logarithmic."""

    low: float
    high: float
    start: float = 0.0
    end: float = 1.0
    log: bool = False

    def __post_init__(self) -> None:
        if self.log and self.low < LOWEST_OF_LOGS:
            object.__setattr__(self, "low", LOWEST_OF_LOGS)
            object.__setattr__(self, "high", max(self.high, 10 * LOWEST_OF_LOGS))

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        at = math.log(max(value, self.low * 1e-9)) if self.log else value
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def placed(self, start: float, end: float) -> Scale:
        """The same scale over another stretch of positions."""
        return replace(self, start=start, end=end)

    def shows(self, value: float) -> bool:
        """Whether the value has a position: finite and not near the end of its range, and positive on a logarithmic scale."""
        return abs(value) <= LARGEST and (value > 0 or not self.log)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Round values inside the scale."""
        if not self.log:
            return linear_ticks(self.low, self.high, wanted)
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5)):
            found = [d * 10.0**e for e in exponents for d in digits if self.low <= d * 10.0**e <= self.high]
            if len(found) >= 3:
                return found[:: math.ceil(len(found) / (wanted + 2))]
        return linear_ticks(self.low, self.high, wanted)


def linear_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(wanted, 1)
    if rough < SMALLEST:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def linear_scale(*samples: Sequence[float], margin: float = 0.05) -> Scale:
    """A linear scale around all finite samples; equal samples, zeros included, stand in the middle of it."""
    values = [value for sample in samples for value in sample if abs(value) <= LARGEST]
    low, high = min(values, default=0.0), max(values, default=1.0)
    wide = high - low > max(NARROW * max(abs(low), abs(high)), SMALLEST)
    middle_pad = abs(high) * 0.05 if abs(high) > SMALLEST else 1.0
    pad = (high - low) * margin if wide else middle_pad
    return Scale(low - pad, high + pad)


def log_scale(*samples: Sequence[float], margin: float = 0.04) -> Scale:
    """A logarithmic scale around all positive samples."""
    values = [value for sample in samples for value in sample if SMALLEST < value <= LARGEST]
    low, high = min(values, default=1.0), max(values, default=10.0)
    stretch = math.exp(margin * (math.log(high) - math.log(low))) if high > low * (1 + NARROW) else 2.0
    return Scale(low / stretch, high * stretch, log=True)


def tick_label(value: float) -> str:
    """Short: trailing zeros add nothing on an axis, and many digits would run into its label."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5:
        exponent = math.floor(math.log10(abs(value)))
        return f"{value / 10**exponent:.2g}×10{superscript(exponent)}".removeprefix("1×")
    text = number(float(f"{value:.3g}"), 3)
    return text.rstrip("0").rstrip(".") if "." in text and "×" not in text else text.removeprefix("1×")
