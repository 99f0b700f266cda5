"""The dispatcher: help, version, unknown commands, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.tiny_models import save_model
from zloss import __version__
from zloss.cli import main as cli
from zloss.cli.protocol import Center
from zloss.errors import OutputError, UnwritableFolderError


def test_help_and_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], []):
        assert cli.main(argv) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out
    assert cli.main(["audti"]) == cli.BAD_INPUT
    assert "Did you mean 'audit'" in capsys.readouterr().err


def test_help_answers_in_half_a_second() -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "zloss.cli.main", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


def test_only_an_unwritable_folder_is_answered_with_the_flag_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wording of the error used to decide, so a reworded one lost the flag."""
    (tmp_path / "file").write_text("")
    assert cli.main(["audit", "--out", str(tmp_path / "file" / "out")]) == cli.BAD_INPUT
    assert capsys.readouterr().err.endswith("is not a writable folder. Choose another folder. Set it with --out.\n")
    for error, sentence in (
        (UnwritableFolderError("the disk is full."), "the disk is full. Set it with --out."),
        (OutputError("it is full. Choose another folder."), "it is full. Choose another folder."),
    ):
        monkeypatch.setattr(Center, "run", Mock(side_effect=error))
        assert cli.main(["center"]) == cli.BAD_INPUT
        assert capsys.readouterr().err == f"zloss center: {sentence}\n"


def test_an_optional_package_that_is_missing_is_one_sentence_and_a_module_of_our_own_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ModuleNotFoundError("No module named 'huggingface_hub'", name="huggingface_hub.utils")
    monkeypatch.setattr(cli, "_run", Mock(side_effect=missing))
    assert cli.main(["center", "model"]) == 2
    assert capsys.readouterr().err == (
        "zloss center: This command needs the package 'huggingface_hub', which is not installed: "
        "pip install 'zloss[audit]' (in a clone of zloss: '.[audit]').\n"
    )
    missing.name = "zloss.gone"
    with pytest.raises(ModuleNotFoundError):
        cli.main(["center", "model"])


def test_the_model_has_one_name_in_title_record_and_command(tmp_path: Path) -> None:
    """The page's title and report.json used to contain folders of the machine, which the recorded command leaves out."""
    model, text = save_model("gpt2", tmp_path / "some" / "where" / "tiny"), tmp_path / "text.txt"
    text.write_text("a few words and more of them " * 40)
    out = tmp_path / "out"
    words = ["audit", str(model), "--text", str(text), "--blocks", "2", "--block-size", "16", "--no-figures", "--quiet"]
    assert cli.main([*words, "--gradient-blocks", "0", "--out", str(out)]) == 0
    record, page = (out / "report.json").read_text(), (out / "report.html").read_text()
    assert json.loads(record)["model"]["name"] == "tiny"
    # The options of this call, not those of the process that runs it.
    recorded = json.loads(record)["provenance"]["command"]
    assert recorded.startswith("zloss audit ./tiny --text text.txt --blocks 2")
    assert "<title>tiny · zloss</title>" in page
    assert str(tmp_path) not in record + page


def test_a_long_sentence_is_one_line_in_a_pipe_and_wrapped_at_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["reproduce"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["reproduce"]) == 2
    wrapped = capsys.readouterr().err
    assert max(map(len, wrapped.splitlines())) <= 60
    assert wrapped.split() == line.split()
