"""The live view of a run."""

from __future__ import annotations

import math

import pytest

from zloss.results.step_record import StepRecord
from zloss.train.step.live import RunProgress, TerminalView, progress_lines

RECORD = StepRecord(3, 4.5, 4.4, 0.1, 2.0, 0.5, 10.0, 1.0, 0.25, seconds=0.5, telemetry={"p_z_999": 12.3456})


def test_a_line_tells_loss_rate_violation_and_tail() -> None:
    progress = RunProgress("ce-0-s1", 4, 0)
    progress.norms.extend([1.0, 3.0, math.nan])
    progress.record, progress.tokens = RECORD, 1024
    assert progress_lines(progress, 100)[1] == "  loss 4.5000  2,048 tok/s  P_Z 12.3  p99 ‖g‖ 2.98"


def test_a_run_that_goes_on_starts_where_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with TerminalView().run("centered-0.0001-s1", 4, done=2) as shown:
        shown.show(RECORD, 1024)
    printed = capsys.readouterr().err
    assert "step 3 of 4" in printed
    assert "P_Z 12.3" in printed
