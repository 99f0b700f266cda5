"""Folders are checked before the work starts, appear whole or not at all, and parts of killed processes are removed."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zloss.errors import InputError, OutputError
from zloss.results.folder import check_folder, locked_folder, whole_folder
from zloss.results.io import part_prefix, remove_abandoned, why_not_written, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "deep" / "model") as part:
        (part / "weights").write_text("new")
        assert not (tmp_path / "deep" / "model").exists()
    assert names(tmp_path / "deep") == ["model"]
    with whole_folder(tmp_path / "deep" / "model") as part:
        (part / "other").write_text("newer")
    assert names(tmp_path / "deep" / "model") == ["other"]
    (tmp_path / "plain").mkdir()
    modes = {stat.S_IMODE((tmp_path / place).stat().st_mode) for place in ("plain", "deep/model")}
    assert len(modes) == 1


class SafetensorError(Exception):
    """As the library of that name has it."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (Exception("No space left on device (os error 28)"), "os error 28"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), "PytorchStreamWriter"),
    ],
)
def test_a_write_that_fails_leaves_the_earlier_folder(tmp_path: Path, error: Exception, words: str) -> None:
    """Errors of Rust and C++ libraries ended in tracebacks."""
    with whole_folder(tmp_path / "model") as part:
        (part / "weights").write_text("earlier")

    def fail() -> None:
        with whole_folder(tmp_path / "model") as part:
            (part / "weights").write_text("half")
            raise error

    with pytest.raises(OutputError, match=words):
        fail()
    assert names(tmp_path) == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "earlier"


def test_another_error_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "model"):
        _ = 1 / 0
    with pytest.raises(InputError, match="not this"), whole_folder(tmp_path / "model"):
        raise InputError("not this")
    assert names(tmp_path) == []
    assert why_not_written(ValueError("x")) is None
    SafetensorError.__module__ = "safetensors_rust"
    assert why_not_written(SafetensorError("I/O error")) == "I/O error"


def test_parts_of_ended_processes_are_removed_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    code = (
        "import os, sys, tempfile; from pathlib import Path; from zloss.results.io import *\n"
        "folder = Path(sys.argv[1])\n"
        "made = Path(tempfile.mkdtemp(dir=folder, prefix=part_prefix('m'), suffix=SUFFIX))\n"
        "handle = os.open(made, os.O_RDONLY); take_lock(handle); (made / 'weights').write_text('x' * 1000)\n"
        "print(made.name, flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    held = other.stdout.readline().strip()
    ended = tmp_path / ".report.json.zloss-999999999-abc.part"
    ended.write_text("half")
    foreign = tmp_path / ".something.part"
    foreign.write_text("not ours")
    mine = tmp_path / f"{part_prefix('x')}abc.part"
    mine.write_text("being written")
    write_text(tmp_path / "report.json", "{}")
    assert names(tmp_path) == sorted([held, foreign.name, mine.name, "report.json"])
    other.kill()
    other.communicate()
    remove_abandoned(tmp_path)
    assert names(tmp_path) == sorted([foreign.name, mine.name, "report.json"])


def test_a_name_of_255_bytes_is_written(tmp_path: Path) -> None:
    """The part's name was longer than the file's, and too long for the file system."""
    path = tmp_path / ("n" * 250 + ".json")
    write_text(path, "x")
    assert names(tmp_path) == [path.name]
    with pytest.raises(OutputError, match="File name too long"):
        write_text(tmp_path / ("n" * 256), "x")
    assert names(tmp_path) == [path.name]


def test_links_are_not_written_through(tmp_path: Path) -> None:
    """A link that somebody planted under the name of a temporary file was written through."""
    victim = tmp_path / "victim"
    victim.write_text("important")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f".zloss-{os.getpid()}").symlink_to(victim)
    check_folder(tmp_path / "out")
    assert victim.read_text() == "important"
    assert names(tmp_path / "out") == [f".zloss-{os.getpid()}"]


def test_a_folder_that_can_be_made_is_left_unmade(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "deeper")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (check_folder, r"cannot write to .*out: .*file is not a writable folder"),
        (lambda folder: write_text(folder / "report.json", "x"), r"cannot write .*report\.json.*Choose another folder"),
        (lambda folder: locked_folder(folder).__enter__(), "cannot write to"),
    ],
)
def test_a_file_in_the_way_is_named(tmp_path: Path, write: Callable[[Path], object], sentence: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=sentence):
        write(tmp_path / "file" / "out")
