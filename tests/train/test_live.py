"""The live view of a run: which run of how many, which step, how long, and the numbers of the last step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rich.cells import cell_len

from zloss.results.steps import StepRecord
from zloss.train.live import Position, RunProgress, TerminalView, duration, progress_lines

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


@pytest.mark.parametrize("name", ["ce-0-s1", "active_route_mean:matched-0.001-standard-0.0001-s12345"])
@pytest.mark.parametrize("width", [80, 120])
def test_the_progress_of_a_run_fits_and_says_which_run_which_step_and_how_long(name: str, width: int) -> None:
    now = [0.0]
    progress = RunProgress(name, 20000, 100, Position(7, 12, 5 * 20000), clock=lambda: now[0])
    assert [cell_len(line) <= width for line in progress_lines(progress, width)] == [True, True]
    assert "-:-- left" in progress_lines(progress, width)[0]
    for step in range(101, 201):
        now[0] += 2.0
        telemetry = {"p_z_999": 30.31, "a_p_99": 12.0} | ({"valid_ce": 9.9876} if step == 150 else {})
        progress.show(replace(RECORD, step=step, loss=10.12345, grad_norm=1234.5, telemetry=telemetry), 1024)
    first, second = progress_lines(progress, width)
    assert cell_len(first) <= width
    assert cell_len(second) <= width
    for part in (
        "run 7 of 12",
        "step 200 of 20000",
        f"{duration(2.0 * 19800)} left",
        f"{duration(2.0 * 119800)} for all",
    ):
        assert part in first, part
    for part in ("loss 10.1235", "valid CE 9.9876", "2,048 tok/s", "P_Z 30.3"):
        assert part in second, part


def test_a_single_run_has_no_place_in_a_series() -> None:
    line = progress_lines(RunProgress("ce-0-s1", 10, 5), 80)[0]
    assert "run" not in line
    assert "all" not in line
    assert "━" in line
