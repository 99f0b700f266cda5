"""A series of runs: checked before the first one, shown while it trains, with numbers at the end and a way to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.tiny_models import save_model
from zloss.cli.main import main
from zloss.results.step_record import StepRecord
from zloss.train.step.live import Position, RunProgress, duration, progress_lines

SMALL = ["--steps", "6", "--warmup", "1", "--micro-batch", "1", "--block-size", "16", "--valid-blocks", "6"]
SMALL += ["--gradient-blocks", "0", "--trackers", "none", "--checkpoint-every", "0"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: str(save_model(kind, root / kind)) for kind in ("gpt2", "gemma2")}


def train(model: str, out: Path, *more: str) -> int:
    return main(["train", model, *SMALL, "--out", str(out), *more])


def steps(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def test_a_method_that_the_model_refuses_is_named_before_the_first_run(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(models["gemma2"], tmp_path / "runs", "--methods", "ce,standard,centered") == 2
    error = capsys.readouterr().err.strip()
    assert "centered cannot be trained on" in error
    assert "softcap" in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.rglob("steps.jsonl")), "nothing was trained"


def test_other_settings_in_a_later_folder_are_named_before_the_first_run(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(models["gpt2"], tmp_path, "--methods", "standard", "--lr", "1e-3") == 0
    assert train(models["gpt2"], tmp_path, "--methods", "ce,standard") == 2
    assert "standard-0.0001-s1 holds a run with other settings (lr differ)" in capsys.readouterr().err
    assert not (tmp_path / "ce-0-s1").exists()


def test_validation_while_training_is_recorded_and_changes_nothing(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(models["gpt2"], tmp_path / "with", "--methods", "standard", "--validate-every", "2") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "done" in line]
    run = tmp_path / "with" / "standard-0.0001-s1"
    metrics = json.loads((run / "metrics.json").read_text())
    assert f"PPL {metrics['ppl']:.4g}" in line
    assert f"P_Z^99.9 {metrics['p_z_999']:.4g}" in line
    assert cell_len(line) <= 80
    seen = {record["step"]: record["telemetry"].get("valid_ce") for record in steps(run)}
    assert [step for step, value in seen.items() if value is not None] == [2, 4, 6]
    assert seen[6] == pytest.approx(metrics["ce"], rel=1e-5), "all six validation blocks, after the last step"
    assert train(models["gpt2"], tmp_path / "without", "--methods", "standard", "--validate-every", "0") == 0
    plain = steps(tmp_path / "without" / "standard-0.0001-s1")
    assert [record["loss"] for record in plain] == [record["loss"] for record in steps(run)]
    assert json.loads((tmp_path / "without" / "standard-0.0001-s1" / "metrics.json").read_text()) == metrics


def test_an_interruption_says_how_to_go_on(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zloss.train.grid.run_training_of", interrupted)
    assert train(models["gpt2"], tmp_path / "some runs", "--methods", "ce") == 130
    error = capsys.readouterr().err
    assert "interrupted: finished runs" in error
    assert f"zloss train {models['gpt2']} --steps 6" in error
    assert f"--out '{tmp_path / 'some runs'}'" in error


def record(step: int, valid: float | None = None) -> StepRecord:
    telemetry: dict[str, float | None] = {"p_z_999": 30.31, "a_p_99": 12.0}
    return StepRecord(
        step=step,
        loss=10.12345,
        cross_entropy=10.1,
        auxiliary=0.01,
        grad_norm=1234.5,
        grad_inf=0.1,
        param_norm=10.0,
        postclip_norm=1.0,
        postclip_inf=0.1,
        micro_batches=1,
        micro_nan=0,
        micro_inf=0,
        gradient="finite",
        updated=True,
        lr=1e-3,
        seconds=0.5,
        telemetry=telemetry if valid is None else telemetry | {"valid_ce": valid},
        adam=None,
    )


@pytest.mark.parametrize("name", ["ce-0-s1", "active_route_mean:matched-0.001-standard-0.0001-s12345"])
@pytest.mark.parametrize("width", [80, 120])
def test_the_progress_of_a_run_fits_and_says_which_run_which_step_and_how_long(name: str, width: int) -> None:
    now = [0.0]
    progress = RunProgress(name, 20000, 100, Position(7, 12, 5 * 20000), clock=lambda: now[0])
    assert [cell_len(line) <= width for line in progress_lines(progress, width)] == [True, True]
    assert "-:-- left" in progress_lines(progress, width)[0]
    for step in range(101, 201):
        now[0] += 2.0
        progress.show(record(step, 9.9876 if step == 150 else None), 1024)
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
