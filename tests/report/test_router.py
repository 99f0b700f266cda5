"""Routers on the terminal and on the page: names instead of keys, and what is hypothetical is called so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.laws.example_results import ROUTERS
from tests.report.printing import printed
from zloss.cli.main import main
from zloss.decide.answer import decide_results
from zloss.decide.decision_map import decide
from zloss.report.audit import audit_summary
from zloss.report.files import render_page
from zloss.results.audit import AuditReport
from zloss.results.files import read_record
from zloss.results.router import MeasuredScale, RouterFindings

MEASURED = MeasuredScale(1e-3, 0.0, (2e-5, 2e-5), 2.0, 2.0, (2.0, 2.0), None, 1e-7, name="our trainer")
STRANGE = ("not_squared", "squared_mean", "unexplained")


def shown(report: AuditReport, router: RouterFindings) -> tuple[str, str]:
    audited = replace(report, router=router)
    return printed(audit_summary(audited, verbose=True)), render_page(decide_results(audits=(audited,)))


def test_quantities_have_names_and_a_coefficient_of_ours_is_called_hypothetical(report: AuditReport) -> None:
    terminal, page = shown(report, ROUTERS)
    for text in (terminal, page):
        assert "hypothetical, at coefficient 0.001 under token_layer_mean" in text
        for key in ("softmax_normalizer", "applied.relative_per_layer", "log_z.p999", "correction_norm", "per_layer.0"):
            assert key not in text
    assert "load CV" in page
    assert "layers.0.gate" in page
    assert "p99.9 log Z_R (nat)" in terminal
    assert all(cell_len(line.rstrip()) <= 80 for line in terminal.splitlines())
    own = replace(ROUTERS, coef=0.02, coef_origin="configuration", coef_key="router_z_loss_coef")
    for text in shown(report, own):
        assert "hypothetical" not in text
        assert all(part in text for part in ("at the model", "router_z_loss_coef", "= 0.02"))


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


@pytest.mark.parametrize(
    ("changes", "fired", "value", "action"),
    [
        # The `relative` of a gradient without a scale is that of the nearest square, and not a matched scale.
        *(
            ({"relative": 1.0, "verdict": verdict, "residual": 0.4}, True, None, "Replace the penalty")
            for verdict in STRANGE
        ),
        ({"relative": 4.0, "target": None, "verdict": "undetermined"}, None, None, ""),
        # A negative scale got a negative coefficient to match it.
        ({"relative": -1.0, "relative_per_layer": (-1.0, -1.0)}, True, -1.0, "Correct the sign"),
        ({"relative": 1.0}, False, 1.0, ""),
        # Within rounding of 1.
        ({"relative": 1.03, "residual": 0.02, "limit": 0.05}, False, 1.03, ""),
        ({"relative": 1.06, "residual": 0.02, "limit": 0.05}, True, 1.06, ""),
    ],
)
def test_a_measured_scale_is_decided(
    changes: dict[str, Any], fired: bool | None, value: float | None, action: str
) -> None:
    scale = replace(MEASURED, **changes)
    (decided,) = [one for one in decide(None, routers=[scale]) if one.stage == "Router reduction"]
    assert (decided.fired, decided.value) == (fired, value)
    assert decided.action.startswith(action)
    if value is None:
        assert scale.sentence in decided.reason
    if action == "Correct the sign":
        assert decided.measured == ()
        assert "Warning: the scale is negative" in decided.reason
