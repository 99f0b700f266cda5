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


def _in_a_shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `$Z` is the command."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "Z": f"{sys.executable} -m zloss"}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "train --help",
        "glossary",
        "report report.json --out page --verbose",
        "audit-loss loss.py:loss --verbose",
    ],
)
def test_a_closed_pipe_is_exit_code_141(words: str, report: AuditReport, tmp_path: Path) -> None:
    """Tables of rich ended in 1, which means that a check failed."""
    report.write(tmp_path / "report.json")
    (tmp_path / "loss.py").write_text("from torch.nn.functional import cross_entropy as loss\n")
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "zloss", *words.split()],
        cwd=tmp_path,
        env=environment,
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("$Z router-scale --out x.json >&-", 0, ""),
        ("$Z report nothing 2>&-", 2, ""),
        ("$Z router-scale --out x.json <&- >&- 2>&-", 0, ""),
        ("$Z report nothing 2>&1 | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("$Z --version >/dev/full", 2, "zloss --version: No space left on device.\n"),
        ("$Z train --help >/dev/full", 2, "zloss train: No space left on device.\n"),
    ],
)
def test_closed_streams_and_a_full_disk_are_no_traceback(line: str, code: int, error: str, tmp_path: Path) -> None:
    """Standard output that is closed before Python starts is None."""
    done = _in_a_shell(line, tmp_path)
    assert (done.returncode, done.stderr) == (code, error)
    assert (tmp_path / "x.json").exists() == ("x.json" in line)
