"""Blocks and the positions of a model: the default fits, what does not fit is one sentence, rotary models are warned of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Refused
from tests.tiny_models import save_model
from zloss.cli.main import main

POSITIONS = 128


AUDIT = ["--blocks", "2", "--gradient-blocks", "0", "--no-figures"]
TRAIN = ["--methods", "ce", "--steps", "2", "--warmup", "0", "--micro-batch", "1", "--valid-blocks", "2"]
TRAIN += ["--gradient-blocks", "0", "--trackers", "none", "--checkpoint-every", "0"]
IMPLEMENTATION = ["--blocks", "1", "--implementations", "none", "--update-blocks", "0", "--overflow-blocks", "0"]


def commands(model: Path, out: Path) -> dict[str, list[str]]:
    """Every command that cuts a text into blocks for a model."""
    run = out / "checkpoints"
    for step in ("1", "2"):
        shutil.copytree(model, run / f"checkpoint-{step}", dirs_exist_ok=True)
    return {
        "audit": ["audit", str(model), *AUDIT, "--out", str(out / "audit")],
        "train": ["train", str(model), *TRAIN, "--out", str(out / "train")],
        "center": ["center", str(model), "--blocks", "1", "--out", str(out / "center")],
        "drift": ["drift", str(run), "--blocks", "8", *AUDIT[2:], "--out", str(out / "drift")],
        "audit-implementation": ["audit-implementation", str(model), *IMPLEMENTATION, "--out", str(out / "impl")],
    }


@pytest.mark.parametrize("name", ["audit", "train", "center", "drift", "audit-implementation"])
def test_the_default_is_what_the_model_has_and_more_is_one_sentence_with_the_largest_that_fits(
    name: str, gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    argv = commands(gpt2, tmp_path)[name]
    refused([*argv, "--block-size", "200"], "--block-size is 200", f"use at most {POSITIONS}")
    assert main(argv) == 0
    captured = capsys.readouterr()
    said = " ".join((captured.out + captured.err).split())
    assert f"Blocks have {POSITIONS} predictions, not 256: the model has {POSITIONS} positions" in said


def test_the_record_of_an_audit_and_of_a_run_have_the_size_that_was_used(gpt2: Path, tmp_path: Path) -> None:
    made = commands(gpt2, tmp_path)
    assert main([*made["audit"], "--quiet"]) == 0
    report = json.loads((tmp_path / "audit" / "report.json").read_text())
    assert report["corpus"]["block_size"] == POSITIONS
    assert "128 positions" in report["notes"][0]
    assert "128 positions" in (tmp_path / "audit" / "report.html").read_text()
    assert main([*made["train"], "--quiet"]) == 0
    assert json.loads((tmp_path / "train" / "ce-0-s1" / "config.json").read_text())["block_size"] == POSITIONS
    assert main([*made["train"], "--quiet", "--block-size", str(POSITIONS)]) == 0, "the same run, finished before"


def test_rotary_models_are_read_beyond_their_positions_with_a_warning(
    neox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = commands(neox, tmp_path)["audit"]
    assert main([*audit, "--block-size", "200"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Warning: blocks of 200 predictions are longer than the 128 positions" in said
    assert main([*audit, "--block-size", "128", "--out", str(tmp_path / "fits")]) == 0
    assert "Warning" not in capsys.readouterr().out


def test_the_bos_takes_one_position(tmp_path: Path, refused: Refused) -> None:
    model = save_model("gpt2", tmp_path / "model", bos=True)
    audit = ["audit", str(model), *AUDIT, "--out", str(tmp_path / "audit")]
    refused([*audit, "--block-size", "128"], "use at most 127")
    assert main(audit) == 0
    assert json.loads((tmp_path / "audit" / "report.json").read_text())["corpus"]["block_size"] == 127
