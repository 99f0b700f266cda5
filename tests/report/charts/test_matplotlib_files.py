"""Figure files by matplotlib."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zloss.errors import InputError
from zloss.report.charts.geometry import geometry_panels
from zloss.report.charts.matplotlib_files import draw_panel, write_figures
from zloss.report.charts.panel import Layer, Mark, Note
from zloss.report.charts.scale import tick_label
from zloss.report.charts.spectrum import spectrum_panels
from zloss.report.charts.tails import tail_panels
from zloss.report.text.symbols import mathtext
from zloss.results.audit import AuditReport
from zloss.results.figure_data import Figures


def test_figures_are_written_whole_and_reproducibly(report: AuditReport, tmp_path: Path) -> None:
    written = write_figures(tmp_path / "a", report)
    assert [path.name for path in written] == [
        f"{name}.{suffix}" for name in ("gradient_geometry", "tails", "spectrum") for suffix in ("svg", "png")
    ]
    for path in written:
        content = path.read_bytes()
        if path.suffix == ".svg":
            assert ElementTree.fromstring(content).tag.endswith("svg")
        else:
            assert content.startswith(b"\x89PNG")
        assert len(content) > 5000
    again = write_figures(tmp_path / "b", report, formats=("svg",))
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written if path.suffix == ".svg"]


def test_a_figure_without_data_is_left_out(report: AuditReport, tmp_path: Path) -> None:
    only = replace(report, figures=Figures(spectrum=report.figures.spectrum))
    assert [path.name for path in write_figures(tmp_path, only, formats=("png",))] == ["spectrum.png"]
    # A capped model has raw columns only.
    sample = report.figures.geometry
    assert sample is not None
    raw_only = replace(
        sample,
        x_centered=(),
        y_centered=(),
        a2_centered=(),
        rank16_centered=(),
        delta_z_centered=(),
        delta_u_centered=(),
    )
    assert write_figures(tmp_path / "raw", replace(report, figures=Figures(geometry=raw_only)), formats=("svg",))


def test_an_unknown_format_is_refused(report: AuditReport, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gif"):
        write_figures(tmp_path, report, formats=("gif",))


def test_a_file_shows_what_the_page_shows(report: AuditReport) -> None:
    """Both renderers take the same panel: axis labels, limits and numbers of dots and lines agree with it."""
    from matplotlib.figure import Figure

    for panel in (*geometry_panels(report), *tail_panels(report), *spectrum_panels(report)):
        axes = Figure().subplots()
        draw_panel(axes, panel)
        assert axes.get_xlim() == pytest.approx((panel.x.scale.low, panel.x.scale.high))
        assert axes.get_ylim() == pytest.approx((panel.y.scale.low, panel.y.scale.high))
        assert (axes.get_xlabel(), axes.get_title()) == (mathtext(panel.x.label), mathtext(panel.title))
        assert [text.get_text() for text in axes.get_xticklabels()] == [tick_label(tick) for tick in panel.x.ticks()]
        dots = [series for series in panel.series if series.kind in ("cloud", "points", "spots")]
        assert [len(cloud.get_offsets()) for cloud in axes.collections] == [len(series.xs) for series in dots]
        lines = [layer for layer in panel.layers if isinstance(layer, Mark) and layer.kind != "arrow"]
        assert len(axes.lines) == len(lines) + sum(series.kind == "line" for series in panel.series)
        assert len(axes.texts) == sum(isinstance(layer, Note) or _is_arrow(layer) for layer in panel.layers)
        assert len(axes.patches) == 2 * sum(series.kind == "steps" for series in panel.series)


def _is_arrow(layer: Layer) -> bool:
    return isinstance(layer, Mark) and layer.kind == "arrow"
