"""Recorded command lines repeat what was asked and tell nothing about the machine."""

from __future__ import annotations

from pathlib import Path

from zloss.cli.command_line import command_line, running


def test_paths_lose_their_folders_and_ids_stay(tmp_path: Path) -> None:
    model, text, out = tmp_path / "model", tmp_path / "some text.txt", tmp_path / "not" / "there"
    model.mkdir()
    text.write_text("words")
    got = command_line(["audit", str(model), "--text", str(text), "--out", str(out), "--coef", "1e-3"])
    assert got == "zloss audit ./model --text 'some text.txt' --out there --coef 1e-3"
    assert (
        command_line(["audit", "EleutherAI/pythia-70m", "--blocks", "4"])
        == "zloss audit EleutherAI/pythia-70m --blocks 4"
    )


def test_the_words_of_the_running_command_are_recorded() -> None:
    with running(["audit", "--blocks", "4"]):
        assert command_line() == "zloss audit --blocks 4"
    assert command_line() != "zloss audit --blocks 4"
