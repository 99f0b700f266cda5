"""External text cannot control the terminal, and the encoding of the terminal cannot abort the work."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zloss.cli.main import main
from zloss.console import Terminal, guarded_output, printable
from zloss.results.audit import AuditReport

HOSTILE = "\x1b[2J\x1b]0;title\x07[/x][bold]\x9b31m"


def test_control_characters_are_made_visible() -> None:
    assert printable("a\x1b[2Jb\x00\x7f\x9b") == "a␛[2Jb␀␡�"
    assert printable("λ\n\tx") == "λ\n\tx"


def test_names_reach_neither_the_terminal_s_control_nor_its_markup(
    report: AuditReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`[/x]` in a model's name ended in a MarkupError, and escape sequences ran."""
    named = replace(report, model=replace(report.model, name=HOSTILE), corpus=replace(report.corpus, name=HOSTILE))
    named.write(tmp_path / "report.json")
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "␛[2J" in printed.out
    assert "[/x][bold]" in printed.out
    assert not any(byte in printed.out + printed.err for byte in ("\x1b", "\x07", "\x9b"))


def test_lines_are_guarded_too(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded_output():
        sys.stdout.writelines(["a\x1b[2J", "b\n"])
    assert capsys.readouterr().out == "a␛[2Jb\n"


def test_an_error_shows_what_was_typed_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", HOSTILE]) == 2
    error = capsys.readouterr().err
    assert "␛[2J" in error
    assert "\x1b" not in error


def test_progress_of_a_step_with_a_hostile_name(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    with Terminal().step(f"loading {HOSTILE}", None):
        pass
    assert "[/x]" in shown.getvalue()
    assert "\x1b]0;" not in shown.getvalue()


def test_colors_stay_on_a_terminal() -> None:
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w", encoding="utf-8") as terminal:
        before, sys.stdout = sys.stdout, terminal
        try:
            with guarded_output():
                print("\x1b[1mbold\x1b[0m \x1b[2J")
        finally:
            sys.stdout = before
        terminal.flush()
        assert os.read(reader, 1000).decode().startswith("\x1b[1mbold\x1b[0m ␛[2J")
    os.close(reader)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_that_is_not_utf_8_gets_escapes(encoding: str) -> None:
    """The table's λ was an error after the work was done."""
    words = ["router-scale", "--layers", "2", "--top-k", "2"]
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-m", "zloss", *words], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\\u03bb" in done.stdout.decode(encoding)


def test_a_closed_pipe_is_no_traceback() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "zloss", "--help"], env=environment, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert b"Traceback" not in done.stderr
    assert done.stderr == b""
