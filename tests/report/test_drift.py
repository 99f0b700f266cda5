"""Drift on the page, in figures and on a terminal of 80 columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.decide.made_up_drift import made_up_drift
from tests.report.printing import printed
from zloss.decide.answer import decide_results
from zloss.errors import InputError
from zloss.report.document import Figure
from zloss.report.drift import drift_figures, drift_summary
from zloss.report.figures import CENTERED, RAW
from zloss.report.files import render_page, write_result
from zloss.results.audit import AuditReport
from zloss.results.drift import Drift, DriftNumbers
from zloss.results.files import load_results

GROWN = (2.0, 2.0, 9.0, 12.0)


def figures(drift: Drift) -> dict[str, Figure]:
    return {figure.name: figure for group in drift_figures(drift).values() for figure in group}


def marked(figure: Figure) -> list[float]:
    """Where the dashed lines are."""
    layers = (layer for layer in figure.spec["layer"] if layer["mark"]["type"] == "rule")
    return [row["x"] for layer in layers for row in layer["data"]["values"]]


def test_every_watched_number_has_a_figure_and_the_onset_a_line() -> None:
    found = figures(made_up_drift(GROWN))
    assert list(found) == ["ppl", "mu_abs_99", "mu_rms", "p_z_999", "a_p_99", "sigma_1", "e_1", "r_z"]
    assert marked(found["mu_abs_99"]) == [300.0]
    assert dict(found["p_z_999"].series).keys() == {RAW, CENTERED}
    assert dict(found["mu_rms"].series).keys() == {RAW}
    ppl = found["ppl"]
    (curve,) = ppl.spec["layer"][0]["data"]["values"]
    low, high = ppl.spec["encoding"]["y"]["scale"]["domain"]
    # A change of PPL within the tolerance looks still.
    assert high - low > 0.02 * min(curve["y"])
    assert curve["x"] == [100.0, 200.0, 300.0, 400.0]
    assert not any(marked(figure) for figure in figures(made_up_drift([2.0, 2.0])).values())


def test_numbers_that_do_not_exist_are_left_out() -> None:
    drift = made_up_drift(GROWN)
    capped = tuple(
        replace(each, centered=DriftNumbers(), raw=replace(each.raw, mu_abs_99=None, mu_rms=None, r_z=None))
        for each in drift.checkpoints
    )
    drift = replace(drift, checkpoints=capped, movements=())
    assert list(figures(drift)) == ["ppl", "p_z_999", "a_p_99", "sigma_1", "e_1"]
    assert render_page(decide_results(drifts=(drift,)))


def test_the_page_says_the_finding_and_has_every_checkpoint(report: AuditReport) -> None:
    """The first checkpoint that shows a movement was called its beginning."""
    drift = made_up_drift(GROWN)
    page, shown = render_page(decide_results(drifts=(drift,))), printed(drift_summary(drift), 200)
    for said in ("Drift of made-up run", "Drift that CE cannot see", "CE cannot see it", "first seen at step"):
        assert said in page
    assert all(each.name in page for each in drift.checkpoints)
    assert page.count("<figure") == 8
    for text in (shown, page):
        assert "it began between steps 200 and 300" in text
        assert "began at step" not in text
        assert "from step 300" not in text
    assert "Decision map" not in page
    both = render_page(decide_results(audits=(report,), drifts=(drift,)))
    assert "Decision map" in both
    assert "Drift that CE cannot see" in both


def test_a_panel_whose_number_did_not_move_says_so() -> None:
    """The axis of a still number shows its rounding as large as a movement."""
    found = figures(made_up_drift(GROWN))
    assert found["a_p_99"].caption == "Did not move."
    assert found["p_z_999"].caption.endswith("first seen at step 300. Centered: did not move.")
    assert "Did not move" not in found["mu_abs_99"].caption
    assert found["ppl"].caption == ""


def test_tables_and_limits_explain_only_what_they_show() -> None:
    drift = made_up_drift(GROWN)
    page, shown = render_page(decide_results(drifts=(drift,))), printed(drift_summary(drift), 80)
    assert "fp32 residual" not in shown
    assert "least_gain" not in page
    assert "least change of" in page
    raw, centered = (page.index(f">{head} head<") for head in ("Raw", "Centered"))
    assert raw < centered


def test_the_written_files_are_read_back(tmp_path: Path) -> None:
    drift = made_up_drift(GROWN)
    written = [path.name for path in write_result(tmp_path, decide_results(drifts=(drift,)))]
    figures = [f"drift_{part}.{suffix}" for part in ("source", "transport") for suffix in ("svg", "png")]
    assert written == ["drift.json", "report.html", *figures]
    assert [(one.kind, one.record) for one in load_results([tmp_path])] == [("drift", drift)]


def test_a_drift_has_one_change_of_ce_between_two_checkpoints() -> None:
    with pytest.raises(InputError, match="`ce_changes` is expected to have one entry between two `checkpoints`"):
        replace(made_up_drift(GROWN), ce_changes=())
