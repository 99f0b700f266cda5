"""Figures as Vega-Lite specifications: their parts, what a page adds to them, and their files.

A result kind describes a figure once, as data (`panel`). On a page `interactive` adds tooltips, zoom and series that can be
hidden; in a file vl-convert draws the panels side by side, without a browser and without a network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from zloss.errors import InputError, MissingDependencyError
from zloss.report.document import Figure
from zloss.results.folder import FORMATS
from zloss.results.io import write_bytes
from zloss.results.quantities import BY_KEY

Spec = dict[str, Any]
Values = Sequence[float | None]
Domain = tuple[float, float]

RAW, CENTERED = "raw head", "centered head"
TONES = {RAW: "#b9502b", CENTERED: "#1d6c8c"}
"""Colors of the two coordinates."""
COLORS = ("#5f6b73", "#8a8f2a", "#b9502b", "#1d6c8c", "#7a4fa3", "#2f8f5b", "#c28a1b", "#a33b63")
"""Colors of methods, in the order in which a figure names them."""
INK, SOFT, RULE, STRONG = "#1c2026", "#646b76", "#e3e0da", "#c9c5bc"
ON_PAGE = {
    INK: "--ink", SOFT: "--soft", RULE: "--rule", STRONG: "--rule-strong",
    TONES[RAW]: "--raw", TONES[CENTERED]: "--centered",
}  # fmt: skip
"""Color → the variable of the page's style sheet, which has another value in the dark."""
LARGEST, SMALLEST = 1e290, 1e-290
"""Values beyond these are not drawn: the difference of two of them overflows, and 0 has no logarithm."""
AXIS_HEIGHT = 60
"""Pixels below a frame, for the labels and the title of its axis."""
FILE_FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
"""Has every letter of our symbols; a picture has no fallback font for a missing one."""
CONFIG: Spec = {
    "font": 'ui-sans-serif, system-ui, "Segoe UI", Roboto, Arial, sans-serif',
    "view": {"stroke": STRONG},
    "axis": {
        "gridColor": RULE, "domain": False, "ticks": False, "tickCount": 5, "labelColor": SOFT, "labelFontSize": 11,
        "labelPadding": 6, "labelOverlap": "greedy", "titleColor": INK, "titleFontSize": 12, "titleFontWeight": "normal",
        "titlePadding": 8,
    },
    "title": {"anchor": "start", "fontSize": 13, "fontWeight": 600, "color": INK, "offset": 10},
    "legend": {"orient": "top", "title": None, "symbolType": "circle", "symbolOpacity": 1, "labelColor": INK, "labelLimit": 300},
}  # fmt: skip


def panel(
    name: str,
    title: str,
    axes: tuple[Spec, Spec],
    series: Iterable[tuple[str, str]],
    layers: Iterable[Spec],
    caption: str = "",
    *,
    of: str = "",
    **size: int,
) -> Figure:
    """A figure: its two axes, the (name, color) of its series, and layers in drawing order; `of` is the drawn quantity."""
    series = tuple(series)
    scale = {"domain": [name for name, _ in series], "range": [color for _, color in series]}
    x, y = ({"field": field, **axis} for field, axis in zip("xy", axes, strict=True))
    color = {"field": "series", "type": "nominal", "scale": scale}
    spec = {"encoding": {"x": x, "y": y, "color": color}, "layer": list(layers)}
    return Figure(name, title, spec, series, caption, BY_KEY[of].hint if of else "", **size)


def axis(title: str, domain: Domain, *, log: bool = False) -> Spec:
    """A numeric axis; on a logarithmic one the lines of the grid between powers of ten are faint."""
    smallest, largest = domain[0] if log else 1.0, max(map(abs, domain))
    # Plain digits; powers of ten where these would be long.
    look: Spec = {"format": ",~f" if 1e-3 <= largest < 1e6 and smallest >= 1e-5 else ".2~e"}
    if log:
        power = "abs(log(datum.value) / LN10 - round(log(datum.value) / LN10)) < 1e-6"
        look["gridOpacity"] = {"condition": {"test": power, "value": 1}, "value": 0.3}
    scale: Spec = {"domain": list(domain), "nice": False, **({"type": "log"} if log else {"zero": False})}
    return {"type": "quantitative", "title": plain_symbols(title), "scale": scale, "axis": look}


def axis_of(key: str, domain: Domain, *, log: bool = False) -> Spec:
    """The axis of a quantity: its symbol with the unit."""
    return axis(BY_KEY[key].axis, domain, log=log)


def curve(series: str, xs: Values, ys: Values, *, log_x: bool = False, log_y: bool = False, **more: Any) -> Spec:
    """The values of one series as a row of data, with five digits; what an axis cannot show is a gap."""
    shown = (
        [
            float(f"{value:.5g}")
            if value is not None and abs(value) <= LARGEST and (not log or value > SMALLEST)
            else None
            for value in values
        ]
        for values, log in ((xs, log_x), (ys, log_y))
    )
    return {"series": series, **dict(zip("xy", shown, strict=True)), **more}


def layer(mark: str, rows: Sequence[Spec], encoding: Spec | None = None, **look: Any) -> Spec:
    """One layer; rows that hold whole columns of values are one row per value when they are drawn."""
    made: Spec = {
        "data": {"values": list(rows)}, "mark": {"type": mark, **look, "clip": True}, "encoding": encoding or {},
    }  # fmt: skip
    if columns := [name for name in ("x", "y") if any(isinstance(row.get(name), list) for row in rows)]:
        made["transform"] = [{"flatten": columns}]
    return made


def dots(rows: Sequence[Spec], *, size: float = 9, opacity: float = 0.35, hollow: bool = False) -> Spec:
    """A cloud of dots per row; `hollow` ones are rings, so that two clouds differ by more than their hue."""
    if hollow:
        return layer("point", rows, shape="circle", filled=False, size=1.8 * size, opacity=opacity, strokeWidth=0.6)
    return layer("circle", rows, size=size, opacity=opacity)


def lines(rows: Sequence[Spec], *, points: float = 0) -> Spec:
    """A line per row, broken at gaps, dashed where the row says `dash`; `points` is the size of dots on it."""
    scale = {"domain": [False, True], "range": [[1, 0], [4, 4]]}
    dashed = {"strokeDash": {"field": "dash", "type": "nominal", "legend": None, "scale": scale}}
    look = {"point": {"size": points, "filled": True, "opacity": 1}} if points else {}
    return layer("line", rows, dashed if any(row.get("dash") for row in rows) else None, strokeWidth=1.4, **look)


def steps(
    series: str, edges: Sequence[float], heights: Sequence[float], floor: float, *, dashed: bool = False
) -> list[Spec]:
    """A histogram that stands on `floor`: filled bars, and their outline."""
    shown = [max(height, floor) for height in heights]
    bars = [
        {"series": series, "x": left, "x2": right, "y": height, "y2": floor}
        for left, right, height in zip(edges[:-1], edges[1:], shown, strict=True)
        if height > floor
    ]
    outline = [{"series": series, "x": list(edges), "y": [*shown, shown[-1]]}]
    return [
        layer("rect", bars, {"x2": {"field": "x2"}, "y2": {"field": "y2"}}, opacity=0.16, strokeWidth=0),
        layer(
            "line", outline, interpolate="step-after", strokeWidth=1.4, tooltip=None, strokeDash=[4, 2 if dashed else 0]
        ),
    ]


def rules(at: Mapping[str, float | None]) -> Spec:
    """A vertical dashed line for each series that has a value."""
    rows = [{"series": name, "x": value} for name, value in at.items() if value is not None]
    return layer("rule", rows, {"y": {"value": "height"}, "y2": {"value": 0}}, strokeDash=[4, 4])


def reference(xs: Sequence[float], ys: Sequence[float], *, color: str = STRONG, dash: tuple[int, int] = (2, 4)) -> Spec:
    """A reference line, which is not data."""
    rows = [{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)]
    return layer("line", rows, {"color": {"value": color}}, strokeWidth=1, strokeDash=list(dash), tooltip=None)


def note(x: float, y: float, text: str, *, dy: float = 0, **look: Any) -> Spec:
    """A short label at a point."""
    rows, color = [{"x": x, "y": y}], {"color": {"value": INK}}
    return layer("text", rows, color, text=text, fontSize=12, dy=dy, tooltip=None, **look)


def arrow(tail: float, head: float, y: float) -> list[Spec]:
    """A horizontal arrow."""
    look = {"shape": f"triangle-{'left' if head < tail else 'right'}", "size": 60, "filled": True, "opacity": 1}
    tip = layer("point", [{"x": head, "y": y}], {"color": {"value": INK}}, **look, tooltip=None)
    return [reference((tail, head), (y, y), color=INK, dash=(1, 0)), tip]


def linear_domain(*samples: Values, margin: float = 0.05) -> Domain:
    """Around all values that can be shown; equal values are in the middle."""
    values = [value for sample in samples for value in sample if value is not None and abs(value) <= LARGEST]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low > max(1e-12 * max(abs(low), abs(high)), SMALLEST):
        return low - margin * (high - low), high + margin * (high - low)
    pad = abs(high) * 0.05 if abs(high) > SMALLEST else 1.0
    return low - pad, high + pad


def log_domain(*samples: Values, margin: float = 0.04) -> Domain:
    """Around all positive values that can be shown."""
    values = [value for sample in samples for value in sample if value is not None and SMALLEST < value <= LARGEST]
    low, high = min(values, default=1.0), max(values, default=10.0)
    stretch = math.exp(margin * (math.log(high) - math.log(low))) if high > low * (1 + 1e-12) else 2.0
    return low / stretch, high * stretch


def color_of(index: int) -> str:
    """The color of the n-th method, in every figure of a page."""
    return COLORS[index % len(COLORS)]


def interactive(figure: Figure) -> Spec:
    """The specification as a page draws it: as wide as its column, with tooltips, zoom, and series that can be hidden.

    The variable `hidden` holds the names of hidden series. Shift and the wheel zoom, so that the wheel alone scrolls the page;
    a double click resets the view.
    """
    axes = {name: figure.spec["encoding"][name] for name in ("x", "y")}
    layers, zoomed = [], False
    for drawn in figure.spec["layer"]:
        if any("series" in row for row in drawn["data"]["values"]):
            shown = {"filter": "indexof(hidden, datum.series) < 0"}
            drawn = {**drawn, "transform": [*drawn.get("transform", ()), shown]}
            if "tooltip" not in drawn["mark"]:
                drawn |= _tooltip(drawn, {name: found.get("title") for name, found in axes.items()})
            if not zoomed and "y" not in drawn["encoding"]:
                numeric = [name for name, found in axes.items() if found["type"] == "quantitative"]
                select = {"type": "interval", "encodings": numeric, "zoom": "wheel![event.shiftKey]"}
                drawn["params"], zoomed = [{"name": "zoom", "select": select, "bind": "scales"}], True
        layers.append(drawn)
    return {
        "width": "container",
        "height": figure.height + AXIS_HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        **figure.spec,
        "layer": layers,
        "params": [{"name": "hidden", "value": []}],
        "config": {**CONFIG, "legend": {"disable": True}, "background": None},
    }


def _tooltip(drawn: Spec, titles: Mapping[str, str | None]) -> Spec:
    """What a layer with tooltips has instead: rows with a heading, the shown values, and a mark that can be pointed at."""
    rows, mark = drawn["data"]["values"], drawn["mark"]
    shown = [
        {"field": name, "type": "quantitative", "format": ".4~g", "title": title or name}
        for name, title in (("x", titles["x"]), ("x2", "to"), ("y", titles["y"]))
        if title is not None and any(name in row for row in rows)
    ]
    if mark["type"] == "line" and "point" not in mark:
        # A line has no values to point at, so invisible dots carry them.
        mark = {**mark, "point": {"size": 70, "opacity": 0, "filled": True}}
    return {
        "data": {"values": [{"tip": row["series"], **row} for row in rows]},
        "mark": mark,
        # The name of the series becomes the heading of a tooltip.
        "encoding": {**drawn["encoding"], "tooltip": [{"field": "tip", "title": "title"}, *shown]},
    }


def write_figures(
    folder: Path, figures: Mapping[str, Sequence[Figure]], *, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """A file NAME.svg and NAME.png for each name, its figures side by side; a name without figures is left out."""
    unknown = [suffix for suffix in formats if suffix not in FORMATS]
    if unknown:
        raise InputError(f"unknown figure format {unknown[0]!r}: expected {' or '.join(FORMATS)}.")
    written = []
    for name, panels in figures.items():
        svg = drawn(panels) if panels and formats else ""
        for suffix in formats if svg else ():
            path = folder / f"{name}.{suffix}"
            write_bytes(path, svg.encode() if suffix == "svg" else bytes(_vl_convert().svg_to_png(svg, scale=2)))
            written.append(path)
    return written


def drawn(figures: Sequence[Figure], *, titled: bool = True) -> str:
    """The figures side by side with one legend, as SVG; the same figures give the same text."""
    series = dict(pair for figure in figures for pair in figure.series)
    scale = {"domain": list(series), "range": list(series.values())}
    panels = []
    for figure in figures:
        encoding = {**figure.spec["encoding"], "color": {**figure.spec["encoding"]["color"], "scale": scale}}
        panel = {"width": figure.width, "height": figure.height, **figure.spec, "encoding": encoding}
        panels.append({"title": plain_symbols(figure.title), **panel} if titled else panel)
    config = {**CONFIG, "font": FILE_FONT}
    spec = {"hconcat": panels, "resolve": {"scale": {"color": "shared"}}, "config": config, "background": "white"}
    svg = str(_vl_convert().vegalite_to_svg(spec, allowed_base_urls=[]))
    # The numbering of clip paths continues from one drawing to the next.
    numbers = {found: str(i) for i, found in enumerate(dict.fromkeys(re.findall(r'id="clip(\d+)"', svg)))}
    return re.sub(r'(id="clip|url\(#clip)(\d+)', lambda match: match[1] + numbers[match[2]], svg)


def figure_scripts(*, static: bool = False) -> list[str]:
    """What a page with figures includes: Vega, Vega-Lite and vega-embed as one script, which defines `vegaEmbed`.

    A `static` page needs none of them, only the package that draws its pictures.
    """
    vl_convert = _vl_convert()
    return [] if static else [_bundle(vl_convert)]


@cache
def _bundle(vl_convert: Any) -> str:
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def _vl_convert() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise MissingDependencyError("vl-convert-python", "Drawing figures", "audit") from error
    return vl_convert


SUPERSCRIPTS = str.maketrans("0123456789.", "⁰¹²³⁴⁵⁶⁷⁸⁹·")
SUBSCRIPTS = dict(zip("aehijklmnoprstuvx0123456789", "ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ₀₁₂₃₄₅₆₇₈₉", strict=True))
SYMBOL = re.compile(r"(?<![\w.:])([A-Za-zΑ-Ωα-ω])(?:_([A-Za-zα-ω]+|\d+)(?![\w]))?(?:\^([\d.]*\d))?")
"""One letter, then _sub and ^sup as the paper writes them: P_Z^99.9, δ_u, s_rel, λ_diag."""


def plain_symbols(text: str) -> str:
    """Symbols with superscript and subscript letters where Unicode has them.

    >>> plain_symbols("A_p^99 of P_Z^99.9, ‖δ_u‖")
    'Aₚ⁹⁹ of P_Z⁹⁹·⁹, ‖δᵤ‖'
    """

    def one(match: re.Match[str]) -> str:
        sub = match[2] or ""
        lowered = "".join(SUBSCRIPTS[letter] for letter in sub) if set(sub) <= set(SUBSCRIPTS) else f"_{sub}"
        return match[1] + lowered + (match[3] or "").translate(SUPERSCRIPTS)

    return SYMBOL.sub(one, text)
