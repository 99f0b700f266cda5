"""`zloss reproduce` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zloss.cli import main as cli
from zloss.cli.reproduce import Reproduce
from zloss_paper.engine.recipe import labels


def test_list_shows_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(label in shown for label in labels())
    assert "tab:related_work" not in shown


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    none, out = str(tmp_path / "none"), ["--out", str(tmp_path / "out")]
    for words, sentence in (
        (["tab:pretraned"], "Did you mean 'tab:pretrained'?"),
        ([], "no table was requested"),
        (["tab:pretrained", "--text", f"{none}.txt", *out], "none.txt"),
        (["tab:router", "--model", none, *out], "not found: no such folder"),
        (["tab:router", "--rejudge", *out], "tab_router.json"),
    ):
        assert cli.main(["reproduce", *words]) == cli.BAD_INPUT
        assert sentence in capsys.readouterr().err


def test_two_labels_in_one_call_at_smoke_size(
    gpt2_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claims were judged on two blocks of 32 tokens, or on four steps of training."""
    words = ["reproduce", "tab:pretrained", "text:reporting", "--profile", "smoke", "--model", str(gpt2_folder)]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    shown, page = capsys.readouterr().out, (tmp_path / "tab_pretrained.md").read_text()
    assert "ours/paper" in shown
    assert "not checked at smoke size" in shown
    assert "not checked at smoke size" in page
    assert "does not hold" not in shown
    assert "**" not in page
    data = json.loads((tmp_path / "tab_pretrained.json").read_text())
    assert data["provenance"]["command"] == "zloss reproduce tab:pretrained --profile smoke --model tiny-gpt2"
    assert len(list((tmp_path / "audits").iterdir())) == 1
    assert (tmp_path / "text_reporting.md").is_file()
    assert cli.main([*words, "--out", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_a_claim_that_does_not_hold_exits_with_one(
    gpt2_folder: Path, neox_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random weights do not have the Z-loss budget of the trained models whose place they take."""
    words = ["reproduce", "text:tied_paths", "--out", str(tmp_path)]
    models = ["--model", f"GPT-2={gpt2_folder}", "--model", f"Pythia-160M={neox_folder}"]
    small = ["--blocks", "8", "--block-size", "32"]
    assert cli.main([*words, *models, *small, "--quiet"]) == cli.FAILED_CHECK
    data = json.loads((tmp_path / "text_tied_paths.json").read_text())
    assert "does not hold" in {claim["verdict"] for claim in data["claims"]}
    assert capsys.readouterr().out == ""
    # Judged again from the file alone.
    assert cli.main([*words, "--rejudge"]) == cli.FAILED_CHECK
    assert "does not hold" in capsys.readouterr().out
    assert json.loads((tmp_path / "text_tied_paths.json").read_text()) == data


def test_the_command_names_files_only(tmp_path: Path) -> None:
    file = tmp_path / "valid.txt"
    file.write_text("x")
    command = Reproduce(texts=(str(file),), model=(f"gpt2={tmp_path}",), blocks=4).command("tab:router")
    assert (
        command == f"zloss reproduce tab:router --profile cpu --model gpt2={tmp_path.name} --text valid.txt --blocks 4"
    )
