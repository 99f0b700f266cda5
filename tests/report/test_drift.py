"""Drift on the page, in figures and on a terminal of 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.decide.drift.made_up_run import made_up_drift
from zloss.decide.decided_results import decide_results
from zloss.report.charts.drift import drift_panels
from zloss.report.charts.panel import Mark
from zloss.report.files import write_drift
from zloss.report.html.page import render_page
from zloss.report.terminal.drift import print_drift
from zloss.results.audit import AuditReport
from zloss.results.drift import DriftNumbers
from zloss.results.files import load_results

GROWN = (2.0, 2.0, 9.0, 12.0)


def test_every_watched_number_has_a_panel_and_the_onset_a_line() -> None:
    panels = {panel.name: panel for panel in drift_panels(made_up_drift(GROWN))}
    assert list(panels) == ["ppl", "mu_abs_99", "mu_rms", "p_z_999", "a_p_99", "sigma_1", "e_1", "r_z"]
    (mark,) = (layer for layer in panels["mu_abs_99"].layers if isinstance(layer, Mark))
    assert mark.xs == (300.0, 300.0)
    assert {series.name for series in panels["p_z_999"].series} == {"raw", "centered"}
    assert {series.name for series in panels["mu_rms"].series} == {"raw"}
    ppl = panels["ppl"]
    # A change of PPL within the tolerance looks still.
    assert ppl.y.scale.high - ppl.y.scale.low > 0.02 * min(ppl.series[0].ys)
    assert ppl.series[0].xs == (100.0, 200.0, 300.0, 400.0)
    assert not any(
        isinstance(layer, Mark) for panel in drift_panels(made_up_drift([2.0, 2.0])) for layer in panel.layers
    )


def test_numbers_that_do_not_exist_are_left_out() -> None:
    drift = made_up_drift(GROWN)
    capped = tuple(
        replace(each, centered=DriftNumbers(), raw=replace(each.raw, mu_abs_99=None, mu_rms=None, r_z=None))
        for each in drift.checkpoints
    )
    drift = replace(drift, checkpoints=capped, movements=())
    assert [panel.name for panel in drift_panels(drift)] == ["ppl", "p_z_999", "a_p_99", "sigma_1", "e_1"]
    assert render_page(decide_results(drifts=(drift,)))


def test_the_page_says_the_finding_and_has_every_checkpoint(report: AuditReport) -> None:
    drift = made_up_drift(GROWN)
    text = render_page(decide_results(drifts=(drift,)))
    assert "Drift of made-up run" in text
    assert "Drift that CE cannot see" in text
    assert "CE cannot see it" in text
    assert all(each.name in text for each in drift.checkpoints)
    assert text.count("<svg") == 8
    assert "Decision map" not in text
    both = render_page(decide_results(audits=(report,), drifts=(drift,)))
    assert "Decision map" in both
    assert "Drift that CE cannot see" in both


def test_the_terminal_view_fits_80_columns_and_cuts_nothing() -> None:
    stream = io.StringIO()
    drift = made_up_drift(GROWN)
    large = replace(drift, checkpoints=tuple(replace(each, step=1000 * each.step) for each in drift.checkpoints))
    print_drift(large, Console(file=stream, width=80))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "100000" in text
    assert "it began between steps 200 and 300" in " ".join(text.split())


def test_the_first_checkpoint_that_shows_a_movement_was_called_its_beginning() -> None:
    drift, stream = made_up_drift(GROWN), io.StringIO()
    print_drift(drift, Console(file=stream, width=200))
    page, printed = render_page(decide_results(drifts=(drift,))), stream.getvalue()
    assert "first seen at step 300" in printed
    assert "first seen at step" in page
    for text in (printed, page):
        assert "it began between steps 200 and 300" in text
        assert "began at step" not in text
        assert "from step 300" not in text


def test_the_written_files_are_read_back(tmp_path: Path) -> None:
    drift = made_up_drift(GROWN)
    written = write_drift(tmp_path, drift)
    assert [path.name for path in written[:2]] == ["drift.json", "report.html"]
    assert {path.name for path in written[2:]} == {
        f"drift_{part}.{suffix}" for part in ("source", "transport") for suffix in ("svg", "png")
    }
    (result,) = load_results([tmp_path])
    assert result.kind == "drift"
    assert result.record == drift
