"""Routers on the terminal and on the page: names instead of keys, and what is hypothetical is called so."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.laws.example_results import ROUTERS
from zloss.cli.main import main
from zloss.decide.answer import decide_results
from zloss.decide.decision_map import decide
from zloss.report.audit import audit_summary
from zloss.report.files import render_page
from zloss.report.terminal import print_document
from zloss.results.audit import AuditReport
from zloss.results.decision import Decision
from zloss.results.files import read_record
from zloss.results.router import MeasuredScale, RouterFindings, ScaleVerdict

MEASURED = MeasuredScale(1e-3, 0.0, (2e-5, 2e-5), 2.0, 2.0, (2.0, 2.0), None, 1e-7, name="our trainer")


def shown(report: AuditReport, router: RouterFindings) -> tuple[str, str]:
    stream = io.StringIO()
    audited = replace(report, router=router)
    print_document(audit_summary(audited), Console(file=stream, width=80))
    return stream.getvalue(), render_page(decide_results(audits=(audited,)))


def router_stage(decisions: tuple[Decision, ...]) -> Decision:
    return next(decision for decision in decisions if decision.stage == "Router reduction")


def test_a_coefficient_of_ours_is_called_hypothetical(report: AuditReport) -> None:
    terminal, page = shown(report, ROUTERS)
    for text in (terminal, page):
        assert "hypothetical, at coefficient 0.001 under token_layer_mean" in text
    own = replace(ROUTERS, coef=0.02, coef_origin="configuration", coef_key="router_z_loss_coef")
    for text in shown(report, own):
        assert "hypothetical" not in text
        assert "at the model" in text
        assert "router_z_loss_coef" in text
        assert "= 0.02" in text


def test_an_older_file_has_a_hypothetical_coefficient() -> None:
    assert ROUTERS.coef_origin == "hypothetical"
    assert ROUTERS.projection == "hypothetical, at coefficient 0.001 under token_layer_mean"


def test_the_page_names_quantities_and_dumps_no_keys(report: AuditReport) -> None:
    terminal, page = shown(report, ROUTERS)
    for key in ("softmax_normalizer", "applied.relative_per_layer", "log_z.p999", "correction_norm", "per_layer.0"):
        assert key not in page
        assert key not in terminal
    assert "load CV" in page
    assert "p99.9 log Z_R (nat)" in terminal
    assert "layers.0.gate" in page
    assert all(cell_len(line.rstrip()) <= 80 for line in terminal.splitlines())


def test_a_measured_scale_is_written_reported_and_decided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = MEASURED.write(tmp_path)
    assert path == tmp_path / "measured_router_scale.json"
    assert read_record(MEASURED.write(tmp_path / "one.json"), MeasuredScale) == MEASURED
    assert main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "s_rel = 2 under our trainer" in out
    assert "Measured router Z-loss: our trainer" in out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Measured router Z-loss: our trainer" in page
    assert MEASURED.sentence.split("²")[1].strip() in page


@pytest.mark.parametrize("verdict", ["not_squared", "squared_mean", "unexplained"])
def test_a_gradient_without_a_scale_fires_by_itself(verdict: ScaleVerdict) -> None:
    """Its `relative` is that of the nearest square, here 1, and must not be read as a matched scale."""
    strange = replace(MEASURED, relative=1.0, verdict=verdict, residual=0.4)
    decided = router_stage(decide(None, routers=[strange]))
    assert decided.fired is True
    assert decided.value is None
    assert strange.sentence in decided.reason
    assert decided.action.startswith("Replace the penalty")


def test_a_measurement_that_could_not_tell_does_not_fire() -> None:
    untold = replace(MEASURED, relative=4.0, target=None, verdict="undetermined")
    decided = router_stage(decide(None, routers=[untold]))
    assert (decided.fired, decided.value) == (None, None)
    assert untold.sentence in decided.reason


def test_a_negative_scale_got_a_negative_coefficient_to_match_it() -> None:
    negative = replace(MEASURED, relative=-1.0, relative_per_layer=(-1.0, -1.0))
    decided = router_stage(decide(None, routers=[negative]))
    assert (decided.fired, decided.value, decided.measured) == (True, -1.0, ())
    assert "Warning: the scale is negative" in decided.reason
    assert decided.action.startswith("Correct the sign")


def test_a_scale_within_rounding_of_one_is_quiet() -> None:
    rounded = replace(MEASURED, relative=1.03, residual=0.02, limit=0.05)
    assert router_stage(decide(None, routers=[rounded])).fired is False
    assert router_stage(decide(None, routers=[replace(rounded, relative=1.06)])).fired is True


def test_a_matched_scale_is_quiet() -> None:
    assert router_stage(decide(None, routers=[replace(MEASURED, relative=1.0)])).fired is False
