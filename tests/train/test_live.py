"""The live view of a run: which run of how many, which step, how long, and the numbers of the last step."""

from __future__ import annotations

import math

import pytest
from rich.cells import cell_len

from zloss.results.steps import StepRecord
from zloss.train.live import TerminalView, numbers_line

RECORD = StepRecord(3, 4.5, 4.4, 0.1, 2.0, 0.5, 10.0, 1.0, 0.25, seconds=0.5, telemetry={"p_z_999": 12.3456})


def test_a_line_tells_loss_validation_rate_violation_and_tail() -> None:
    line = numbers_line(RECORD, 1024, [1.0, 3.0, math.nan], 9.9876)
    assert line == "  loss 4.5000  valid CE 9.9876  2,048 tok/s  P_Z 12.3  p99 ‖g‖ 2.98"


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("runs", [1, 12])
@pytest.mark.parametrize(
    "name", ["centered-0.0001-s1", "centered_active_route_mean:matched-0.001-standard-0.0001-s12345"]
)
def test_a_run_that_goes_on_starts_where_it_was_and_says_how_many_follow(
    name: str, runs: int, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    view = TerminalView()
    view.place(1, runs, (runs - 1) * 20000)
    with view.run(name, 20000, done=2):
        view.show(RECORD, 1024)
    printed = capsys.readouterr().err
    assert all(cell_len(line) <= width for line in printed.splitlines())
    assert "step 3 of 20000" in printed
    assert "P_Z 12.3" in printed
    assert "-:--:--" in printed
    assert ("run 1 of 12  centered" in printed) == ("all later runs" in printed) == (runs > 1)
    assert ("step 3 of 240000" in printed) == (runs > 1)
