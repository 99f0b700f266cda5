"""Figure files by matplotlib."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zloss.errors import InputError
from zloss.report.charts.matplotlib_files import write_figures
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
