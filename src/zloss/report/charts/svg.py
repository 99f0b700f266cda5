"""A panel as SVG text for the page.

Colours and fonts come from the page's style sheet through class names, so one drawing serves light and dark.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from zloss.report.charts.panel import TONES, Layer, Mark, Note, Panel, Series
from zloss.report.charts.scale import Scale, tick_label
from zloss.report.text.symbols import svg_text

LAYERS = 10
"""Paths per cloud of dots."""
DOTS = {"cloud": "", "points": " solid", "spots": " big"}
MARKS = {"quantile": "mark"}
"""Class names of marks that are not the mark's kind."""
LETTER = 7.0
WIDTHS = dict.fromkeys("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", 4.7) | dict.fromkeys(".,", 3.6) | {"×": 9.3}
"""Widths of the letters of a tick label, in pixels of the widest usual font (DejaVu Sans at 11 px)."""
AXIS_TITLE = 32
"""Room for the upright title of an axis and the gaps on both sides of it."""
TOP, BOTTOM, LEFT, RIGHT = 12, 46, 54, 14
"""Margins around the frame; the left and the right one grow with the tick labels."""


@dataclass(frozen=True)
class Drawing:
    """A drawn panel with its words, as the templates show it."""

    title: str
    svg: str
    caption: str


def drawings(panels: Iterable[Panel], prefix: str) -> list[Drawing]:
    """The panels of one part of a page; `prefix` makes their ids unique on it."""
    return [Drawing(panel.title, draw_svg(panel, prefix), panel.caption) for panel in panels]


def draw_svg(panel: Panel, prefix: str) -> str:
    """The whole panel as one `svg` element."""
    name = f"{prefix}-{panel.name}"
    frame = _Frame.of(panel)
    box = f'x="{frame.left:g}" y="{TOP}" width="{frame.right - frame.left:g}" height="{frame.bottom - TOP}"'
    said = _plain(f"{panel.y.label or panel.title} against {panel.x.label}")
    layers = "".join(_layer(layer, frame) for layer in panel.layers)
    return (
        f'<svg class="chart" id="{name}" viewBox="0 0 {panel.width} {panel.height}" role="img" aria-label="{said}" '
        f'data-x="{_scale_data(frame.x)}" data-y="{_scale_data(frame.y)}" '
        f'data-x-name="{_plain(panel.x.label)}" data-y-name="{_plain(panel.y.label)}">'
        f'<clipPath id="clip-{name}"><rect {box}/></clipPath>{_grid(panel, frame)}<rect class="frame" {box}/>'
        f'<g clip-path="url(#clip-{name})">{layers}</g>{_labels(panel, frame)}</svg>'
    )


@dataclass(frozen=True)
class _Frame:
    """Where the axes lie in the drawing."""

    x: Scale
    y: Scale
    x_ticks: tuple[float, ...]

    @classmethod
    def of(cls, panel: Panel) -> _Frame:
        """Margins wide enough for the labels of the ticks, and ticks few enough for their labels."""
        bottom = panel.height - BOTTOM
        widest = max((text_width(label) for label in _y_labels(panel)), default=0.0)
        left = max(float(LEFT), widest + (AXIS_TITLE if panel.y.label else 12))
        ticks = panel.x.scale.ticks()
        x = panel.x.scale.placed(left, panel.width - RIGHT)
        while len(ticks) > 2 and _crowded(ticks, x):
            ticks = ticks[::2]
        if ticks:
            over = x(ticks[-1]) + text_width(tick_label(ticks[-1])) / 2 - panel.width
            x = x.placed(left, panel.width - RIGHT - max(math.ceil(over), 0))
        return cls(x, panel.y.scale.placed(bottom, TOP), tuple(ticks))

    @property
    def left(self) -> float:
        return self.x.start

    @property
    def right(self) -> float:
        return self.x.end

    @property
    def bottom(self) -> int:
        return int(self.y.start)

    def shows(self, x: float, y: float) -> bool:
        return self.x.shows(x) and self.y.shows(y)


def text_width(text: str) -> float:
    """About how wide a tick label is, in pixels."""
    return sum(WIDTHS.get(letter, LETTER) for letter in text)


def _crowded(ticks: list[float], scale: Scale) -> bool:
    places = [(scale(tick), text_width(tick_label(tick)) / 2) for tick in ticks]
    return any(b - a < half_a + half_b + 4 for (a, half_a), (b, half_b) in itertools.pairwise(places))


def _y_labels(panel: Panel) -> list[str]:
    return list(panel.y.names) or [tick_label(tick) for tick in panel.y.ticks()]


def _grid(panel: Panel, frame: _Frame) -> str:
    parts = []
    for tick in frame.x_ticks:
        at = frame.x(tick)
        parts.append(f'<path class="grid" d="M{at:.1f},{TOP}V{frame.bottom}"/>')
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{frame.bottom + 15}" text-anchor="middle">{tick_label(tick)}</text>'
        )
    for tick, label in zip(panel.y.ticks(), _y_labels(panel), strict=True):
        at = frame.y(tick)
        if not panel.y.names:
            parts.append(f'<path class="grid" d="M{frame.left:g},{at:.1f}H{frame.right:g}"/>')
        parts.append(
            f'<text class="tick" x="{frame.left - 7:g}" y="{at + 3.5:.1f}" text-anchor="end">{svg_text(label)}</text>'
        )
    return "".join(parts)


def _labels(panel: Panel, frame: _Frame) -> str:
    middle_x, middle_y = (frame.left + frame.right) / 2, (TOP + frame.bottom) / 2
    places = (
        (panel.x, f'x="{middle_x:.0f}" y="{panel.height - 8}"'),
        (panel.y, f'transform="translate(13 {middle_y:.0f}) rotate(-90)"'),
    )
    return "".join(
        f'<text class="axis" {place} text-anchor="middle">{_hint(axis.hint)}{svg_text(axis.label)}</text>'
        for axis, place in places
        if axis.label
    )


def _plain(text: str) -> str:
    """Text of an attribute."""
    return escape(text, quote=True)


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _layer(layer: Layer, frame: _Frame) -> str:
    if isinstance(layer, Note):
        at = f'x="{frame.x(layer.x):.1f}" y="{frame.y(layer.y):.1f}"'
        return f'<text class="{layer.kind}" {at} text-anchor="middle">{svg_text(layer.text)}</text>'
    if isinstance(layer, Mark):
        css = " ".join(part for part in ("line", MARKS.get(layer.kind, layer.kind), layer.tone) if part)
        path = _polyline(layer, frame)
        drawn = f'<path class="{css}" d="{path}"/>' if path else ""
        return drawn + (_arrow_head(layer, frame, css) if layer.kind == "arrow" else "")
    if layer.kind == "steps":
        return _steps(layer, frame)
    return _line(layer, frame) if layer.kind == "line" else _dots(layer, frame)


def _dots(series: Series, frame: _Frame) -> str:
    """Dots as paths of zero-length strokes: thousands of tokens stay a few elements and a few kilobytes.

    One path is painted once however often it crosses itself; interleaved layers let crowded places grow darker.
    """
    spots = [
        f"M{frame.x(x):.1f},{frame.y(y):.1f}h0" for x, y in zip(series.xs, series.ys, strict=True) if frame.shows(x, y)
    ]
    look = _look("dots ", series, DOTS[series.kind])
    return "".join(f'<path {look} d="{"".join(spots[i::LAYERS])}"/>' for i in range(min(LAYERS, len(spots))))


def _line(series: Series, frame: _Frame) -> str:
    path = _polyline(series, frame)
    if not path:
        return ""
    dash = "" if series.dash is None else f' stroke-dasharray="4 4" stroke-dashoffset="{series.dash}"'
    return f'<path {_look("line ", series)}{dash} d="{path}"/>'


def _look(kind: str, series: Series, suffix: str = "") -> str:
    """Class, colour and tooltip of a series: the two coordinates are classes, methods have a colour of their own."""
    tip = _plain(series.tip or series.name)
    if series.tone in TONES:
        return f'class="{kind}{series.tone}{suffix}" data-label="{tip}"'
    return f'class="{kind}method{suffix}" stroke="{_plain(series.tone)}" data-label="{tip}"'


def _polyline(layer: Series | Mark, frame: _Frame) -> str:
    """A path through the values, broken where one cannot be shown."""
    parts, pen = [], "M"
    for x, y in zip(layer.xs, layer.ys, strict=True):
        if frame.shows(x, y):
            parts.append(f"{pen}{frame.x(x):.1f},{frame.y(y):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _arrow_head(mark: Mark, frame: _Frame, css: str) -> str:
    """A head of fixed size at the last point of a level arrow."""
    x, y = frame.x(mark.xs[-1]), frame.y(mark.ys[-1])
    back = math.copysign(6.0, frame.x(mark.xs[0]) - x)
    return f'<path class="{css}" d="M{x + back:.1f},{y - 4.5:.1f}L{x:.1f},{y:.1f}L{x + back:.1f},{y + 4.5:.1f}"/>'


def _steps(series: Series, frame: _Frame) -> str:
    """A histogram as a filled outline, standing on the lower end of the y scale."""
    floor = frame.y.start
    corners = [f"M{frame.x(series.xs[0]):.1f},{floor:.1f}"]
    for edge, height in zip(series.xs[1:], series.ys, strict=True):
        at = frame.y(height) if frame.y.shows(height) else floor
        corners.append(f"V{min(at, floor):.1f}H{frame.x(edge):.1f}")
    return f'<path class="steps {series.tone}" d="{"".join(corners)}V{floor:.1f}Z"/>'


def _scale_data(scale: Scale) -> str:
    """low, high, start, end, logarithmic: what the page's script needs to read a value from a position."""
    return f"{scale.low:.8g} {scale.high:.8g} {scale.start:g} {scale.end:g} {int(scale.log)}"
