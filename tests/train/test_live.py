"""The live view of a run."""

from __future__ import annotations

import math
from collections import deque

import pytest

from zloss.results.step_record import StepRecord
from zloss.train.step.live import TerminalView, step_text

RECORD = StepRecord(3, 4.5, 4.4, 0.1, 2.0, 0.5, 10.0, 1.0, 0.25, seconds=0.5, telemetry={"p_z_999": 12.3456})


def test_a_line_tells_loss_rate_violation_and_tail() -> None:
    text = step_text(RECORD, 1024, deque([1.0, 3.0, math.nan]))
    assert text == "loss 4.5000  2,048 tok/s  P_Z 12.3  p99 ‖g‖ 2.98"


def test_a_run_that_goes_on_starts_where_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with TerminalView().run("centered-0.0001-s1", 4, done=2) as shown:
        shown.show(RECORD, 1024)
    printed = capsys.readouterr().err
    assert "3/4" in printed
    assert "P_Z 12.3" in printed
