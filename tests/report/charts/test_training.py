"""Curves over steps: the same description for the page and for files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from zloss.report.charts.matplotlib_files import write_panels
from zloss.report.charts.panel import legend
from zloss.report.charts.svg import drawings
from zloss.report.charts.training import Curve, norm_tail_panel, router_panels, step_panel, training_panels
from zloss.results.comparison import Comparison
from zloss.results.method_curves import MethodCurves

COMMITTED = Path(__file__).parents[3] / "docs/results/matched_smollm2.json"


@pytest.fixture(scope="module")
def groups() -> tuple[MethodCurves, ...]:
    return Comparison.from_dict(json.loads(COMMITTED.read_text(encoding="utf-8"))).curves


def test_a_comparison_has_its_curves_and_its_tail(groups: tuple[MethodCurves, ...]) -> None:
    panels = training_panels(groups)
    assert [panel.name for panel in panels] == ["cross_entropy", "p_z_999", "norms"]
    names = [group.name for group in groups]
    assert [name for name, _ in legend(panels)] == names
    assert len({tone for _, tone in legend(panels)}) == len(names)
    for panel in panels:
        assert [series.name for series in panel.series] == names
    assert panels[1].y.scale.log
    assert all('id="c0-' in drawing.svg for drawing in drawings(panels, "c0"))
    assert training_panels([]) == []


def test_a_method_without_a_curve_keeps_its_colour(groups: tuple[MethodCurves, ...]) -> None:
    first, second, *rest = groups
    panels = training_panels([replace(first, curves={}), second, *rest])
    tones = {series.tone for panel in panels for series in panel.series if series.name == second.name}
    assert len(tones) == 1
    assert len(panels[0].series) == len(groups) - 1


def test_the_tail_names_the_largest_steps_where_it_has_them() -> None:
    long = Curve("ce", tuple(float(i) for i in range(1, 1001)), tuple(1 - i / 1000 for i in range(1000)))
    short = Curve("ce", (1.0, 2.0), (1.0, 0.5))
    assert "the largest 1 % of steps" in norm_tail_panel([long]).caption
    assert "largest" not in norm_tail_panel([short]).caption


def test_matched_variants_are_dashed_and_files_are_reproducible(tmp_path: Path) -> None:
    variants = ("token_layer_mean", "active_route_sum", "active_route_sum:matched")
    curves = {name: {"entropy": [1.0, 1.1, 1.2 + i], "load_cv": [0.3, 0.2, 0.1]} for i, name in enumerate(variants)}
    panels = router_panels(curves)
    assert [panel.name for panel in panels] == ["entropy", "load_cv"]
    assert [series.dash is not None for series in panels[0].series] == [False, False, True]
    first, second = write_panels([tmp_path / "a.svg", tmp_path / "b.png"], panels)
    (again,) = write_panels([tmp_path / "c.svg"], panels)
    assert first.read_bytes() == again.read_bytes()
    assert b"entropy (nat)" in first.read_bytes()
    assert second.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_finite_value_still_makes_a_panel(tmp_path: Path) -> None:
    panel = step_panel("p_z_999", [Curve.of_steps("ce", [math.nan, math.nan])])
    assert "nan" not in drawings([panel], "x")[0].svg
    assert write_panels([tmp_path / "x.svg"], [panel])[0].stat().st_size > 1000
