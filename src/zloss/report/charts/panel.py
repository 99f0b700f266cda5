"""A panel of a figure as data: two axes and the layers between them, in drawing order.

A function of a record describes a panel once; svg.py draws it on the page, matplotlib_files.py in a file. Nothing here knows
pixels, style sheets or inches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from zloss.report.charts.scale import Scale
from zloss.results.quantities import BY_KEY

Values = tuple[float, ...]

TONES = {"raw": "#b9502b", "centered": "#1d6c8c"}
"""Colours of the two coordinates on white; the page's style sheet has them as --raw and --centered."""
COLOURS = ("#5f6b73", "#8a8f2a", "#b9502b", "#1d6c8c", "#7a4fa3", "#2f8f5b", "#c28a1b", "#a33b63")
"""Colours of methods, in the order in which a figure names them."""


def colour_of(index: int) -> str:
    """The colour of the n-th method, in every figure of a page."""
    return COLOURS[index % len(COLOURS)]


@dataclass(frozen=True)
class Axis:
    """One axis: its label in words or symbols, its scale, and what the drawn quantity means."""

    label: str
    scale: Scale
    hint: str = ""
    """Tooltip of the label: the definition of the quantity."""
    names: tuple[str, ...] = ()
    """Names of the values 0, 1, …, written in place of numbers."""

    @classmethod
    def of(cls, key: str, scale: Scale, label: str = "") -> Axis:
        """The axis of a quantity: its symbol with the unit, or `label`; the hint is its definition."""
        definition = BY_KEY[key]
        return cls(label or definition.axis, scale, definition.hint)

    def ticks(self) -> list[float]:
        """Where the axis is labelled."""
        return [float(i) for i in range(len(self.names))] if self.names else self.scale.ticks()


@dataclass(frozen=True)
class Series:
    """Data of one name.

    "cloud": thousands of dots, half transparent. "points": the dots of a curve. "spots": a few large dots. "line": a curve,
    broken where a value is missing. "steps": a histogram; `xs` are its edges, one more than `ys`.
    """

    kind: Literal["cloud", "points", "spots", "line", "steps"]
    xs: Values
    ys: Values
    name: str
    """As the legend has it."""
    tone: str
    """"raw", "centered" or the colour of a method, "#rrggbb"."""
    tip: str = ""
    """What a tooltip calls it, where that is more than `name`."""
    dash: int | None = None
    """Offset of the dashes of a dashed line; None is a solid line."""


@dataclass(frozen=True)
class Mark:
    """A line that is no data: "zero" (a reference value), "diagonal", "ray", "quantile", "joined" (a pair), "arrow"."""

    kind: Literal["zero", "diagonal", "ray", "quantile", "joined", "arrow"]
    xs: Values
    ys: Values
    tone: str = ""
    """The coordinate whose value it marks."""


@dataclass(frozen=True)
class Note:
    """A few letters at a place: "note" beside an arrow, "ray-label" on a ray."""

    kind: Literal["note", "ray-label"]
    x: float
    y: float
    text: str


Layer = Series | Mark | Note


@dataclass(frozen=True)
class Panel:
    """One framed panel."""

    name: str
    """Its id on a page, after the id of what it belongs to."""
    title: str
    x: Axis
    y: Axis
    layers: tuple[Layer, ...]
    caption: str = ""
    width: int = 380
    height: int = 300
    """Shape on the page, in pixels of its drawing."""

    @property
    def series(self) -> tuple[Series, ...]:
        """The layers that are data."""
        return tuple(layer for layer in self.layers if isinstance(layer, Series))


def across(axis: Axis) -> Values:
    """Both ends of an axis: a reference line from frame to frame."""
    return (axis.scale.low, axis.scale.high)


def legend(panels: Iterable[Panel]) -> list[tuple[str, str]]:
    """(name, tone) of everything the panels draw, each once, in the order of drawing."""
    return list(dict.fromkeys((series.name, series.tone) for panel in panels for series in panel.series))
