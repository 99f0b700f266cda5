"""Panels drawn for the page: labels keep clear of one another, gaps stay gaps, heads of zeros are drawn."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from importlib.resources import files
from xml.etree import ElementTree

import pytest

from zloss.decide.decided_results import decide_results
from zloss.report.charts.audits_compared import compared_panels
from zloss.report.charts.geometry import geometry_panels
from zloss.report.charts.panel import TONES, Axis, Panel, Series
from zloss.report.charts.scale import Scale, linear_scale
from zloss.report.charts.spectrum import spectrum_panels
from zloss.report.charts.svg import draw_svg, drawings, text_width
from zloss.report.charts.tails import tail_panels
from zloss.report.html.page import render_page
from zloss.results.audit import AuditReport, HeadNumbers, Heads
from zloss.results.figure_data import DrawnHistogram, Figures, GeometrySample, Spectrum
from zloss.results.quantities import BY_KEY

AXIS_TITLE_ENDS = 17
"""Right edge of the upright axis title, in pixels."""


def drawn(panel: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(draw_svg(panel, "x"))


def cloud(x: Scale, y: Scale) -> Panel:
    dots = Series("cloud", (x.low, x.high), (y.low, y.high), "raw", "raw")
    return Panel("p", "t", Axis("across", x), Axis("up", y), (dots,))


@pytest.mark.parametrize("size", [3e-7, 2.5e-5, 1e-3, 1.0, 123456.0, 8e9])
def test_tick_labels_keep_clear_of_the_title_of_the_axis_and_of_the_edge(size: float) -> None:
    svg = drawn(cloud(Scale(0, size), Scale(0, size)))
    width = float(svg.attrib["viewBox"].split()[2])
    ticks = [(element.attrib, "".join(element.itertext())) for element in svg.iter("text")]
    upright = [(float(a["x"]), text) for a, text in ticks if a["class"] == "tick" and a["text-anchor"] == "end"]
    level = [(float(a["x"]), text) for a, text in ticks if a["class"] == "tick" and a["text-anchor"] == "middle"]
    assert len(upright) >= 2
    assert len(level) >= 2
    assert all(x - text_width(text) > AXIS_TITLE_ENDS for x, text in upright)
    assert all(x + text_width(text) / 2 <= width for x, text in level)
    for (x, text), (next_x, next_text) in itertools.pairwise(level):
        assert next_x - x > (text_width(text) + text_width(next_text)) / 2


def test_a_line_is_broken_where_a_value_is_missing() -> None:
    values = (1.0, 2.0, math.nan, 3.0, -1.0, 4.0)
    line = Series("line", tuple(map(float, range(1, 7))), values, "ce", "#123456")
    panel = Panel("p", "t", Axis("step", Scale(0, 7)), Axis("v", Scale(1, 10, log=True)), (line,))
    (path,) = (p for p in drawn(panel).iter("path") if "line" in p.attrib["class"])
    assert re.sub(r"[^ML]", "", path.attrib["d"]) == "MLMM"
    assert path.attrib["data-label"] == "ce"
    assert path.attrib["stroke"] == "#123456"


def test_axes_say_what_they_show(report: AuditReport) -> None:
    (svg,) = (drawn(panel) for panel in tail_panels(report) if panel.name == "tail-gain")
    titles = [title.text for title in svg.iter("title")]
    assert titles == [BY_KEY["gain"].hint]
    assert "paper eq:ap" in (titles[0] or "")
    assert svg.attrib["data-x-name"] == BY_KEY["gain"].symbol


def test_every_layer_is_drawn(report: AuditReport, other: AuditReport) -> None:
    panels = [*geometry_panels(report), *tail_panels(report), *spectrum_panels(report)]
    panels += compared_panels([("one", report), ("a name of more than twenty letters", other)])
    for panel in panels:
        svg = drawn(panel)
        (group,) = (g for g in svg.iter("g") if "clip-path" in g.attrib)
        classes = [element.attrib["class"].split() for element in group]
        for series in panel.series:
            kind = series.kind if series.kind in ("line", "steps") else "dots"
            assert any(kind in css and series.tone in css for css in classes), (panel.name, series.kind)
    assert [len(panel.y.names) for panel in panels[-4:]] == [2] * 4
    assert panels[-1].y.names[1].endswith("…")


def test_a_head_of_zeros_is_drawn(report: AuditReport) -> None:
    # One bin of the smallest width there is: the streamed histogram of 128 zeros.
    zeros = (0.0,) * 128
    histograms = tuple(
        DrawnHistogram(quantity, coordinate, (0.0, 5e-324), (128,))
        for quantity in ("violation", "gain", "shift", "delta_u")
        for coordinate in ("raw", "centered")
    )
    names = (f"{column}_{side}" for column in ("a2", "rank16", "delta_z", "delta_u") for side in ("raw", "centered"))
    sample = GeometrySample(**dict.fromkeys(names, zeros), mean_row_norm=0.0)
    head = HeadNumbers(p_z_999=0.0, a_p_99=0.0, mu_abs_99=0.0, delta_u_99=0.0, diag_z=0.0, sigma_1=0.0)
    flat = replace(
        report,
        heads=Heads(head, head),
        figures=Figures(histograms, Spectrum((0.0,) * 16, (0.0,) * 16), sample),
    )
    text = render_page(decide_results(audits=(flat, flat)))
    assert "nan" not in "".join(drawing.svg for drawing in drawings(tail_panels(flat), "x"))
    assert [panel.name for panel in geometry_panels(flat)] == ["rays"]
    assert text.count('class="steps') == 2 * 7


def test_scales_of_vanishing_width_have_ticks() -> None:
    for low, high in ((0.0, 5e-324), (1.0, 1.0 + 1e-15), (0.0, 1e-310)):
        scale = linear_scale([low, high], margin=0.0)
        assert scale.high > scale.low
        assert 2 <= len(scale.ticks()) <= 12
    assert Scale(0.0, 1e-310).ticks() == [0.0]


def test_the_coordinates_have_one_colour_on_the_page_and_in_files() -> None:
    css = (files("zloss.report.html") / "assets/page.css").read_text(encoding="utf-8")
    for name, colour in TONES.items():
        assert f"--{name}: {colour};" in css.partition("@media")[0]
