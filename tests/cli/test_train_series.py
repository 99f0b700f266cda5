"""A series of runs: checked before the first one, shown while it trains, with numbers at the end and a way to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.tiny_models import save_model
from zloss.cli.main import main

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
