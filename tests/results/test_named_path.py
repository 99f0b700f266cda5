"""Names and recorded commands say nothing about the folders of a machine."""

from __future__ import annotations

from pathlib import Path

from zloss.results.provenance import recorded_command


def test_paths_lose_their_folders_and_ids_stay(tmp_path: Path) -> None:
    model, text, out = tmp_path / "model", tmp_path / "some text.txt", tmp_path / "not" / "there"
    model.mkdir()
    text.write_text("words")
    got = recorded_command(["audit", str(model), "--text", str(text), "--out", str(out), "--coef", "1e-3"])
    assert got == "zloss audit ./model --text 'some text.txt' --out there --coef 1e-3"
    assert (
        recorded_command(["audit", "EleutherAI/pythia-70m", "--blocks", "4"])
        == "zloss audit EleutherAI/pythia-70m --blocks 4"
    )
