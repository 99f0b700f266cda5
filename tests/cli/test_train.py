"""`zloss train`: the files it writes, and a series of runs that is checked before the first one and shown while it trains."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.tiny_models import save_model
from tests.train.tiny_run import SCRATCH
from zloss.cli.main import main


def test_one_folder_per_run(tmp_path: Path, topics: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs"
    options = f"--methods ce,standard --coef 1e-3,1e-4 --seeds 1,2 --text {topics} --steps 8 --checkpoint-every 0"
    words = ["train", *SCRATCH, *options.split(), "--trackers", "none", "--out", str(out)]
    assert main(words) == 0
    runs = {path.name: {file.name for file in path.iterdir()} for path in out.iterdir()}
    assert runs.keys() == {
        f"{name}-s{seed}" for name in ("ce-0", "standard-0.001", "standard-0.0001") for seed in (1, 2)
    }
    for files in runs.values():
        assert {"config.json", "steps.jsonl", "metrics.json", "provenance.json"} <= files
    config = json.loads((out / "standard-0.001-s2" / "config.json").read_text())
    assert (config["method"], config["coef"], config["seed"]) == ("standard", 1e-3, 2)
    everything = "".join(path.read_text() for path in out.rglob("*.json"))
    assert str(tmp_path) not in everything
    assert capsys.readouterr().out.count("done") == 6
    assert main(words) == 0
    assert capsys.readouterr().out.count("skipped") == 6


def test_a_stress_setting_and_tensorboard(tmp_path: Path, topics: Path) -> None:
    options = f"--methods standard --stress update-outlier --text {topics} --steps 4 --out {tmp_path} --quiet"
    assert main(["train", *SCRATCH, *options.split()]) == 0
    config = json.loads((tmp_path / "standard-0.003-s1" / "config.json").read_text())
    assert (config["lr"], config["clip"], config["coef"]) == (8e-4, 1e8, 3e-3)
    assert list((tmp_path / "standard-0.003-s1").rglob("events.out.tfevents*"))


def test_trackers_received_the_folders_of_the_model_and_the_text(
    tmp_path: Path, topics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They got every field of the configuration as given, so full paths were in hparams.yml, event files and runs elsewhere."""
    private = tmp_path / "private"
    text = private / "topics.txt"
    private.mkdir()
    text.write_text(topics.read_text())
    model, out = save_model("gpt2", private / "models" / "tiny"), tmp_path / "runs"
    names = [name for name in ("tensorboard", "mlflow", "wandb") if importlib.util.find_spec(name)]
    assert "tensorboard" in names
    for variable, value in {
        "MLFLOW_TRACKING_URI": f"file://{out}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(out),
    }.items():
        monkeypatch.setenv(variable, value)
    options = f"--text {text} --tokenizer {model} --steps 2 --block-size 24 --valid-blocks 4 --methods ce --save-model"
    options += f" --trackers {','.join(names)} --out {out} --quiet"
    words = ["train", str(model), *options.split()]
    monkeypatch.setattr(sys, "argv", ["zloss", *words])  # W&B records the command line
    assert main(words) == 0
    hparams = [path.read_text() for path in out.rglob("hparams.yml")]
    assert len(hparams) == 1
    assert "model: tiny\n" in hparams[0]
    found = [path for path in out.rglob("*") if path.is_file() and str(private).encode() in path.read_bytes()]
    assert found == []


def test_bf16_runs_or_says_why_not(tmp_path: Path, topics: Path) -> None:
    """In a process without the variable that the tests set: where bf16 products would crash, the command protects itself."""
    environment = {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    options = f"--precision bf16 --head paper --methods ce --steps 2 --text {topics} --out {tmp_path / 'runs'}".split()
    command = [sys.executable, "-m", "zloss.cli.main", "train", *SCRATCH, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2), done.stderr
    if done.returncode == 2:
        assert "--precision fp32" in done.stderr
    else:
        assert (tmp_path / "runs" / "ce-0-s1" / "metrics.json").is_file()


SMALL = ["--steps", "6", "--warmup", "1", "--micro-batch", "1", "--block-size", "16", "--valid-blocks", "6"]
SMALL += ["--gradient-blocks", "0", "--trackers", "none", "--checkpoint-every", "0"]


def train(model: Path, out: Path, *more: str) -> int:
    return main(["train", str(model), *SMALL, "--out", str(out), *more])


def steps(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def test_other_settings_in_a_later_folder_are_named_before_the_first_run(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(gpt2, tmp_path, "--methods", "standard", "--lr", "1e-3") == 0
    assert train(gpt2, tmp_path, "--methods", "ce,standard") == 2
    said = capsys.readouterr().err
    assert "standard-0.0001-s1 contains a run with other settings (--lr: 0.001 there, 5e-05 here)" in said
    assert "choose another folder (--out of `zloss train`)" in said
    assert not (tmp_path / "ce-0-s1").exists()


def test_validation_while_training_is_recorded_and_changes_nothing(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(gpt2, tmp_path / "with", "--methods", "standard", "--validate-every", "2") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "done" in line]
    run = tmp_path / "with" / "standard-0.0001-s1"
    metrics = json.loads((run / "metrics.json").read_text())
    assert f"PPL {metrics['ppl']:.4g}" in line
    assert f"P_Z^99.9 {metrics['p_z_999']:.4g}" in line
    assert cell_len(line) <= 80
    seen = {record["step"]: record["telemetry"].get("valid_ce") for record in steps(run)}
    assert [step for step, value in seen.items() if value is not None] == [2, 4, 6]
    assert seen[6] == pytest.approx(metrics["ce"], rel=1e-5), "all six validation blocks, after the last step"
    assert train(gpt2, tmp_path / "without", "--methods", "standard", "--validate-every", "0") == 0
    plain = steps(tmp_path / "without" / "standard-0.0001-s1")
    assert [record["loss"] for record in plain] == [record["loss"] for record in steps(run)]
    assert json.loads((tmp_path / "without" / "standard-0.0001-s1" / "metrics.json").read_text()) == metrics
