"""Small SVG charts as text: scales, ticks, and layers of points, steps and lines.

Colours and fonts come from the page's style sheet through class names, so one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from zloss.report.text.numbers import number, superscript
from zloss.report.text.symbols import svg_text

LAYERS = 10
"""Paths per cloud of dots."""


@dataclass(frozen=True)
class Scale:
    """Data values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float = 0.0
    end: float = 1.0
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        at = math.log(max(value, self.low * 1e-9)) if self.log else value
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def placed(self, start: float, end: float) -> Scale:
        """The same scale over another stretch of pixels."""
        return Scale(self.low, self.high, start, end, self.log)

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
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def linear_scale(*samples: Sequence[float], margin: float = 0.05) -> Scale:
    """A linear scale around all finite samples."""
    values = [value for sample in samples for value in sample if math.isfinite(value)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    pad = (high - low) * margin if high > low else abs(high) * 0.05 or 1.0
    return Scale(low - pad, high + pad)


def log_scale(*samples: Sequence[float], margin: float = 0.04) -> Scale:
    """A logarithmic scale around all positive samples."""
    values = [value for sample in samples for value in sample if value > 0 and math.isfinite(value)]
    low, high = min(values, default=1.0), max(values, default=10.0)
    stretch = (high / low) ** margin if high > low else 2.0
    return Scale(low / stretch, high * stretch, log=True)


@dataclass(frozen=True)
class Chart:
    """One framed panel; layers are drawn in order."""

    x: Scale
    y: Scale
    x_label: str
    y_label: str
    name: str
    width: int = 380
    height: int = 300
    layers: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    """Drawn without clipping to the frame."""
    show_y_ticks: bool = True
    left: int = 54
    bottom: int = 46
    top: int = 12
    right: int = 14

    @property
    def px(self) -> Scale:
        return self.x.placed(self.left, self.width - self.right)

    @property
    def py(self) -> Scale:
        return self.y.placed(self.height - self.bottom, self.top)

    def points(self, xs: Sequence[float], ys: Sequence[float], css: str, label: str) -> None:
        """Dots as paths of zero-length strokes: thousands of tokens stay a few elements and a few kilobytes.

        One path is painted once however often it crosses itself; interleaved layers let crowded places grow darker.
        """
        px, py = self.px, self.py
        dots = [f"M{px(x):.1f},{py(y):.1f}h0" for x, y in zip(xs, ys, strict=True) if self._drawable(x, y)]
        for i in range(min(LAYERS, len(dots))):
            drawn = "".join(dots[i::LAYERS])
            self.layers.append(f'<path class="dots {css}" data-label="{escape(label, quote=True)}" d="{drawn}"/>')

    def steps(self, edges: Sequence[float], counts: Sequence[float], css: str) -> None:
        """A histogram as a filled outline, standing on the lower end of the y scale."""
        px, py, floor = self.px, self.py, self.py(self.y.low)
        corners = [f"M{px(edges[0]):.1f},{floor:.1f}"]
        for i, height in enumerate(counts):
            at = py(height) if height > 0 or not self.y.log else floor
            corners.append(f"V{min(at, floor):.1f}H{px(edges[i + 1]):.1f}")
        self.layers.append(f'<path class="steps {css}" d="{"".join(corners)}V{floor:.1f}Z"/>')

    def line(self, xs: Sequence[float], ys: Sequence[float], css: str) -> None:
        """A polyline."""
        px, py = self.px, self.py
        spots = [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(xs, ys, strict=True) if self._drawable(x, y)]
        self.layers.append(f'<path class="line {css}" d="M{"L".join(spots)}"/>' if spots else "")

    def text(self, x: float, y: float, text: str, css: str = "note", anchor: str = "start") -> None:
        """A label at a data position."""
        at = f'x="{self.px(x):.1f}" y="{self.py(y):.1f}"'
        self.layers.append(f'<text class="{css}" {at} text-anchor="{anchor}">{svg_text(text)}</text>')

    def _drawable(self, x: float, y: float) -> bool:
        return (x > 0 or not self.x.log) and (y > 0 or not self.y.log) and math.isfinite(x) and math.isfinite(y)

    def render(self) -> str:
        """The whole panel."""
        px, py = self.px, self.py
        bottom, right = self.height - self.bottom, self.width - self.right
        frame = f'<rect class="frame" x="{self.left}" y="{self.top}" width="{right - self.left}" height="{bottom - self.top}"/>'
        grid = []
        for tick in self.x.ticks():
            at = px(tick)
            grid.append(f'<path class="grid" d="M{at:.1f},{self.top}V{bottom}"/>')
            grid.append(
                f'<text class="tick" x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{tick_label(tick)}</text>'
            )
        for tick in self.y.ticks() if self.show_y_ticks else ():
            at = py(tick)
            grid.append(f'<path class="grid" d="M{self.left},{at:.1f}H{right}"/>')
            grid.append(
                f'<text class="tick" x="{self.left - 7}" y="{at + 3.5:.1f}" text-anchor="end">{tick_label(tick)}</text>'
            )
        middle_x, middle_y = (self.left + right) / 2, (self.top + bottom) / 2
        labels = (
            f'<text class="axis" x="{middle_x:.0f}" y="{self.height - 8}" text-anchor="middle">{svg_text(self.x_label)}</text>'
            f'<text class="axis" transform="translate(13 {middle_y:.0f}) rotate(-90)" text-anchor="middle">'
            f"{svg_text(self.y_label)}</text>"
        )
        said = escape(f"{self.y_label} against {self.x_label}", quote=True)
        clip = f'<clipPath id="clip-{self.name}"><rect x="{self.left}" y="{self.top}" '
        clip += f'width="{right - self.left}" height="{bottom - self.top}"/></clipPath>'
        return (
            f'<svg class="chart" id="{self.name}" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{said}" '
            f'data-x="{_scale_data(px)}" data-y="{_scale_data(py)}">'
            f'{clip}{"".join(grid)}{frame}<g clip-path="url(#clip-{self.name})">{"".join(self.layers)}</g>'
            f"{labels}{''.join(self.outside)}</svg>"
        )


def tick_label(value: float) -> str:
    """Short: trailing zeros add nothing on an axis, and many digits would run into its label."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5:
        exponent = math.floor(math.log10(abs(value)))
        return f"{value / 10**exponent:.2g}×10{superscript(exponent)}".removeprefix("1×")
    text = number(float(f"{value:.3g}"), 3)
    return text.rstrip("0").rstrip(".") if "." in text and "×" not in text else text.removeprefix("1×")


def _scale_data(scale: Scale) -> str:
    return f"{scale.low:.8g} {scale.high:.8g} {scale.start:g} {scale.end:g} {int(scale.log)}"
