"""Figures: what they draw, on which axes, and their files."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.straight_histogram import count, log_edges
from zloss.decide.answer import decide_results
from zloss.errors import InputError, MissingDependencyError
from zloss.report.audit_figures import (
    audit_figures,
    compared_figures,
    geometry_figures,
    share_bins,
    spectrum_figures,
    tail_figures,
    thin,
)
from zloss.report.comparison import norm_tail_figure, step_figure, training_figures
from zloss.report.document import Figure
from zloss.report.figures import (
    CENTERED,
    ON_PAGE,
    RAW,
    TONES,
    axis,
    curve,
    drawn,
    interactive,
    linear_domain,
    log_domain,
    write_figures,
)
from zloss.report.files import render_page
from zloss.results.audit import AuditReport, DrawnHistogram, Figures, GeometrySample, HeadNumbers, Heads, Spectrum
from zloss.results.comparison import Comparison
from zloss.results.files import read_record
from zloss.results.options import Coordinate
from zloss.results.quantities import BY_KEY
from zloss.results.record import from_plain

COMMITTED = Path(__file__).parents[2] / "docs/results/matched_smollm2.json"
values = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=60)


def rows(figure: Figure, mark: str) -> list[dict[str, Any]]:
    """The data of all layers with this mark."""
    return [row for layer in figure.spec["layer"] if layer["mark"]["type"] == mark for row in layer["data"]["values"]]


def test_figures_are_written_whole_and_reproducibly(
    report: AuditReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_figures(tmp_path / "a", audit_figures(report))
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
    again = write_figures(tmp_path / "b", audit_figures(report), formats=("svg",))
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written if path.suffix == ".svg"]
    # What cannot be drawn is left out or refused.
    only = replace(report, figures=Figures(spectrum=report.figures.spectrum))
    written = write_figures(tmp_path / "some", audit_figures(only), formats=("png",))
    assert [path.name for path in written] == ["spectrum.png"]
    with pytest.raises(InputError, match="gif"):
        write_figures(tmp_path / "none", audit_figures(report), formats=("gif",))
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingDependencyError, match="vl-convert-python"):
        write_figures(tmp_path / "none", audit_figures(report))
    assert not (tmp_path / "none").exists()


def test_panels_of_one_file_share_one_legend_with_all_colors() -> None:
    """Merging the colors of panels with different series painted all of them alike."""
    first = step_figure("grad_norm", {"ce": ((1, 2), (1.0, 2.0))})
    second = step_figure("entropy", {"ce": ((1, 2), (1.0, 2.0)), "standard": ((1, 2), (1.5, 2.5))})
    svg = drawn([first, second])
    assert svg.count(">standard</text>") == svg.count(">ce</text>") == 1
    assert all(f'stroke="{color}"' in svg for _, color in second.series)


def test_every_sampled_token_is_drawn_once_in_each_coordinate(report: AuditReport) -> None:
    sample = report.figures.geometry
    assert sample is not None
    figures = geometry_figures(report)
    assert [figure.name for figure in figures] == ["plane", "rank16", "rays"]
    for figure in figures:
        # Rings differ from dots without their color; the head of an arrow is a point without a series.
        clouds = [*rows(figure, "circle"), *(row for row in rows(figure, "point") if "series" in row)]
        assert [row["series"] for row in clouds] == [RAW, CENTERED]
        assert all(len(row["x"]) == len(row["y"]) == len(sample) for row in clouds)
    assert rows(figures[0], "circle")[0]["x"] == [float(f"{x:.5g}") for x in sample.x_raw]
    svg = drawn([figures[0]])
    for name in (RAW, CENTERED):
        assert f">{name}</text>" in svg
    tree = ElementTree.fromstring(svg)
    paths = [path.attrib for path in tree.iter("{http://www.w3.org/2000/svg}path")]
    fills, strokes = ([path.get(name, "").lower() for path in paths] for name in ("fill", "stroke"))
    # One more of each color is the entry of the legend.
    assert fills.count(TONES[RAW]) == len(sample) + 1
    assert strokes.count(TONES[CENTERED]) == len(sample) + 1
    assert fills.count(TONES[CENTERED]) == 1


def test_rays_have_the_slope_of_their_label(report: AuditReport) -> None:
    figure = geometry_figures(report)[2]
    labels = [float(layer["mark"]["text"]) for layer in figure.spec["layer"] if layer["mark"]["type"] == "text"]
    rays = [layer["data"]["values"] for layer in figure.spec["layer"] if layer["mark"]["type"] == "line"]
    assert len(labels) == len(rays) >= 2
    for label, (start, end) in zip(labels, rays, strict=True):
        assert (start["x"], start["y"]) == (0, 0)
        assert end["y"] / end["x"] == pytest.approx(label)


def test_thinning_keeps_the_strongest_tokens(report: AuditReport) -> None:
    def strengths(sample: GeometrySample | None) -> list[float]:
        assert sample is not None
        return sorted(map(max, zip(sample.delta_u_raw, sample.delta_u_centered, strict=True)), reverse=True)

    thinned = thin(report, 0.1).figures.geometry
    whole, kept = strengths(report.figures.geometry), strengths(thinned)
    assert 0.09 * len(whole) <= len(kept) <= 0.12 * len(whole)
    assert set(whole[: len(whole) // 100]) <= set(kept)
    assert {len(column) for column in vars(thinned).values() if isinstance(column, tuple)} == {len(kept)}


def test_a_model_without_a_centered_head_is_drawn_raw(report: AuditReport) -> None:
    sample = report.figures.geometry
    assert sample is not None
    empty: dict[str, Any] = {name: () for name in vars(sample) if name.endswith("centered")}
    histograms = tuple(h for h in report.figures.histograms if h.coordinate == "raw")
    figures = replace(report.figures, histograms=histograms, geometry=replace(sample, **empty))
    capped = replace(report, figures=figures, heads=Heads(report.heads.raw, HeadNumbers()))
    assert [figure.title[0] for figure in geometry_figures(capped)] == ["b", "c"]
    assert all(row["series"] == RAW for figure in geometry_figures(capped) for row in rows(figure, "circle"))
    assert len(tail_figures(capped)) == 4
    assert all(drawn(figures) for figures in audit_figures(capped).values())
    assert "No token sample" not in render_page(decide_results(audits=(capped, report)))


@pytest.mark.parametrize(
    ("wide", "narrow", "heights"),
    [
        # Bins that do not nest: ten tokens per unit in both have the same height although one count is four times the other.
        (((0.5, 4.5, 8.5), (40, 40)), ((0.0, 1.0, 2.0), (10, 10)), {RAW: [10.0, 10.0], CENTERED: [10.0, 10.0]}),
        # Nested bins are added up.
        (
            ((0.0, 4.0, 8.0), (40, 40)),
            ((0.0, 1.0, 2.0, 3.0, 4.0), (10, 10, 15, 5)),
            {RAW: [40.0, 40.0], CENTERED: [40.0]},
        ),
    ],
)
def test_histograms_are_compared_on_common_bins_or_per_unit(
    report: AuditReport, wide: Any, narrow: Any, heights: dict[str, list[float]]
) -> None:
    histograms = (DrawnHistogram("gain", "raw", *wide), DrawnHistogram("gain", "centered", *narrow))
    (figure,) = tail_figures(replace(report, figures=Figures(histograms=histograms)))
    found: dict[str, list[float]] = {}
    for row in rows(figure, "rect"):
        found.setdefault(row["series"], []).append(row["y"])
    assert found == heights


def test_a_single_value_makes_a_histogram_and_logarithmic_bins_stay(report: AuditReport) -> None:
    edges = log_edges([2.0, 2.0, 2.0])
    same = from_plain(DrawnHistogram, count("gain", "raw", [2.0, 2.0, math.nan], edges))
    assert sum(same.counts) == 2
    assert log_edges([math.nan, 0.0]) == []
    nothing = from_plain(DrawnHistogram, count("shift", "raw", [math.nan], []))
    flat = DrawnHistogram("violation", "raw", (1.0, 1.0), (3,))
    sample = np.geomspace(1, 1000, 50)
    logarithmic = [from_plain(DrawnHistogram, count("gain", "raw", sample, log_edges(sample)))] * 2
    assert share_bins(logarithmic) == logarithmic  # as they are
    figures = tail_figures(replace(report, figures=Figures(histograms=(same, nothing))))
    assert [figure.title for figure in figures] == ["Output-to-hidden gain"]
    assert tail_figures(replace(report, figures=Figures(histograms=(flat,))))


def test_the_quantile_is_marked_where_it_is(report: AuditReport) -> None:
    figure = next(figure for figure in tail_figures(report) if figure.name == "tail-gain")
    marked = {row["series"]: row["x"] for row in rows(figure, "rule")}
    assert marked == {RAW: report.heads.raw.a_p_99, CENTERED: report.heads.centered.a_p_99}
    assert figure.spec["encoding"]["x"]["title"] == "gain Aₚ"
    assert figure.hint == BY_KEY["gain"].hint
    assert "paper eq:ap" in figure.hint


def nested(sample: list[float], coordinate: Coordinate, exponent: int) -> DrawnHistogram:
    """Bins [i, i+1)·2^e, counted by numpy."""
    width = 2.0**exponent
    first, last = np.floor(min(sample) / width), np.floor(max(sample) / width) + 1
    edges = np.arange(first, last + 1) * width
    counts, _ = np.histogram(sample, bins=edges)
    return DrawnHistogram("gain", coordinate, tuple(edges.tolist()), tuple(counts.tolist()))


@given(values, values, st.integers(3, 8), st.integers(3, 8))
def test_shared_bins_are_what_counting_anew_would_give(a: list[float], b: list[float], ea: int, eb: int) -> None:
    pair = share_bins([nested(a, "raw", ea), nested(b, "centered", eb)])
    assert pair[0].edges == pair[1].edges
    assert 1 <= len(pair[0].counts) <= 80
    for sample, histogram in zip((a, b), pair, strict=True):
        anew = [
            sum(left <= value < right for value in sample)
            for left, right in zip(histogram.edges, histogram.edges[1:], strict=False)
        ]
        assert list(histogram.counts) == anew


def test_the_spectrum_gathers_its_energy(report: AuditReport) -> None:
    sigma, energy = spectrum_figures(report)
    assert report.figures.spectrum is not None
    raw = rows(sigma, "line")[2]
    assert raw["series"] == RAW
    assert raw["y"] == [float(f"{value:.5g}") for value in report.figures.spectrum.raw]
    shares = next(row["y"] for row in rows(energy, "line") if row.get("series") == RAW)
    assert shares[0] == pytest.approx(report.heads.raw.e_1, rel=1e-4)
    assert shares[15] == pytest.approx(report.heads.raw.e_16, rel=1e-4)
    assert shares == sorted(shares)


@pytest.mark.parametrize("factor", [1e-200, 1e200])
def test_squares_of_singular_values_beyond_fp64_left_a_traceback(report: AuditReport, factor: float) -> None:
    spectrum = report.figures.spectrum
    assert spectrum is not None
    damaged = replace(spectrum, raw=tuple(factor * sigma for sigma in spectrum.raw))
    _, energy = spectrum_figures(replace(report, figures=replace(report.figures, spectrum=damaged)))
    assert {row.get("series") for row in rows(energy, "line")} - {None} == {CENTERED}


def test_a_head_of_zeros_is_drawn(report: AuditReport) -> None:
    # One bin of the smallest width there is: the histogram of 128 zeros.
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
        report, heads=Heads(head, head), figures=Figures(histograms, Spectrum((0.0,) * 16, (0.0,) * 16), sample)
    )
    assert [figure.name for figure in geometry_figures(flat)] == ["rays"]
    assert spectrum_figures(flat) == []
    assert all(drawn([figure]) for figure in (*geometry_figures(flat), *tail_figures(flat)))
    assert "Tails over tokens" in render_page(decide_results(audits=(flat, flat)))


def test_audits_are_joined_by_quantity(report: AuditReport, other: AuditReport) -> None:
    figures = compared_figures([("one", report), ("another", other)])
    assert [figure.name for figure in figures] == ["mu_abs_99", "p_z_999", "a_p_99", "delta_u_99"]
    # A centered |μ| is rounding, and is not drawn.
    assert {row["series"] for row in rows(figures[0], "circle")} == {RAW}
    spots = rows(figures[1], "circle")
    assert [(row["y"], row["series"]) for row in spots] == [
        ("one", RAW), ("one", CENTERED), ("another", RAW), ("another", CENTERED),
    ]  # fmt: skip
    assert spots[0]["x"] == report.heads.raw.p_z_999
    assert [(row["x"], row["x2"]) for row in rows(figures[1], "rule")] == [
        (audit.heads.raw.p_z_999, audit.heads.centered.p_z_999) for audit in (report, other)
    ]


def test_a_comparison_has_its_curves_and_its_tail() -> None:
    groups = read_record(COMMITTED, Comparison).curves
    figures, names = training_figures(groups), [group.name for group in groups]
    assert [figure.name for figure in figures] == ["cross_entropy", "p_z_999", "norms"]
    for figure in figures:
        assert [name for name, _ in figure.series] == names
        assert [row["series"] for row in rows(figure, "line") if "series" in row] == names
    assert len({color for _, color in figures[0].series}) == len(names)
    assert figures[1].spec["encoding"]["y"]["scale"]["type"] == "log"
    assert training_figures([]) == []
    # A method without a curve keeps its color.
    figures = training_figures([replace(groups[0], curves={}), *groups[1:]])
    assert {dict(figure.series)[names[1]] for figure in figures} == {dict(figures[-1].series)[names[1]]}
    assert len(rows(figures[0], "line")) == len(groups) - 1


@pytest.mark.parametrize("count", [1000, 2])
def test_the_tail_names_the_largest_steps_where_it_has_them(count: int) -> None:
    tail = {"ce": (tuple(float(i) for i in range(1, count + 1)), tuple(1 - i / count for i in range(count)))}
    assert ("the largest 1 % of steps" in norm_tail_figure(tail).caption) == (count == 1000)


def test_what_an_axis_cannot_show_is_a_gap() -> None:
    row = curve("ce", range(1, 7), (1.0, 2.0, math.nan, 3.0, -1.0, 1e300), log_y=True)
    assert row["y"] == [1.0, 2.0, None, 3.0, None, None]
    figure = step_figure("p_z_999", {"ce": ((1, 2), (math.nan, math.nan))})
    json.dumps(interactive(figure), allow_nan=False)
    assert drawn([figure])


def test_matched_variants_are_dashed_and_drawn_reproducibly() -> None:
    variants = ("token_layer_mean", "active_route_sum", "active_route_sum:matched")
    figure = step_figure("entropy", {name: ((1, 2, 3), (1.0, 1.1, 1.2 + i)) for i, name in enumerate(variants)})
    assert [row["dash"] for row in rows(figure, "line")] == [False, False, True]
    svg = drawn([figure])
    assert svg == drawn([figure])
    assert "entropy (nat)" in svg
    assert 'stroke-dasharray="4,4"' in svg


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20))
def test_axes_have_a_finite_width_whatever_the_values(sample: list[float]) -> None:
    for low, high in (linear_domain(sample), linear_domain(sample, margin=0.0), log_domain(sample)):
        assert math.isfinite(low)
        assert math.isfinite(high)
        assert low < high
    assert log_domain(sample)[0] > 0
    finite = [value for value in sample if abs(value) <= 1e290]
    low, high = linear_domain(sample)
    assert all(low <= value <= high for value in finite)


def test_ticks_are_plain_digits_unless_these_are_long() -> None:
    formats = [axis("x", (0.0, top))["axis"]["format"] for top in (2e-5, 0.02, 400.0, 5e6)]
    assert formats == [".2~e", ",~f", ",~f", ".2~e"]
    assert axis("x", (1e-9, 1.0), log=True)["axis"]["format"] == ".2~e"


def test_a_page_adds_tooltips_zoom_and_hidden_series(report: AuditReport) -> None:
    for figure in (figure for figures in audit_figures(report).values() for figure in figures):
        spec = interactive(figure)
        assert spec["width"] == "container"
        assert spec["params"] == [{"name": "hidden", "value": []}]
        data = [layer for layer in spec["layer"] if "series" in layer["data"]["values"][0]]
        assert data
        assert all({"filter": "indexof(hidden, datum.series) < 0"} in layer["transform"] for layer in data)
        assert sum("params" in layer for layer in spec["layer"]) == 1
        assert any("tooltip" in layer["encoding"] for layer in data)
        # The description itself stays without them: a file has neither.
        assert not any("params" in part for part in (figure.spec, *figure.spec["layer"]))


def test_the_coordinates_have_one_color_on_the_page_and_in_files() -> None:
    css = (files("zloss.report") / "assets/page.css").read_text(encoding="utf-8").partition("@media")[0]
    for color, variable in ON_PAGE.items():
        assert f"{variable}: {color};" in css
