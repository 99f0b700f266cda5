"""A folder of results is checked before the work starts, has one writer at a time, and appears whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zloss.errors import InputError, OutputError
from zloss.results.folder import LOCK_FILE, check_folder, locked_folder, whole_folder
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


def test_a_check_leaves_nothing_and_writes_through_no_link(tmp_path: Path) -> None:
    """A link that somebody planted under the name of a temporary file was written through."""
    victim = tmp_path / "victim"
    victim.write_text("important")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f".zloss-{os.getpid()}").symlink_to(victim)
    check_folder(tmp_path / "out")
    check_folder(tmp_path / "new" / "deeper")  # left unmade
    assert names(tmp_path) == ["out", "victim"]
    assert victim.read_text() == "important"
    assert names(tmp_path / "out") == [f".zloss-{os.getpid()}"]


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


HOLD = (
    "import sys, time; from pathlib import Path; from zloss.results.folder import locked_folder\n"
    "with locked_folder(Path(sys.argv[1])): print('held', flush=True); time.sleep(100)"
)
TRY = """
import os, sys, time
from pathlib import Path
from zloss.errors import InputError
from zloss.results.folder import locked_folder

folder, marker = Path(sys.argv[1]), Path(sys.argv[1]).parent / "inside"
held = refused = 0
until = time.time() + 1.5
while time.time() < until:
    try:
        with locked_folder(folder):
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))  # an error where another is inside
            held += 1
            marker.unlink()
    except InputError:
        refused += 1
print(held, refused)
"""


def started(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


def test_the_holder_is_named_and_a_killed_one_is_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    holder = started(HOLD, folder)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(InputError, match=f"{folder} is in use by another process of zloss .pid {holder.pid}"),
        locked_folder(folder),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (folder / LOCK_FILE).exists()  # the file is left, and means nothing
    with locked_folder(folder):
        assert (folder / LOCK_FILE).read_text() == f"{os.getpid()}\n"
    assert not (folder / LOCK_FILE).exists()


def test_processes_that_compete_are_never_inside_together(tmp_path: Path) -> None:
    """They take and release as fast as they can, so the file is removed between another's opening and locking it."""
    racing = [started(TRY, tmp_path / "runs") for _ in range(3)]
    outcomes = [process.communicate()[0].split() for process in racing]
    assert [process.returncode for process in racing] == [0, 0, 0]
    assert sum(int(held) for held, _ in outcomes) > 10


def test_an_empty_folder_is_not_left_and_a_link_is_not_written_through(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a").exists()
    with locked_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "kept").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["kept"]
    victim = tmp_path / "victim"
    victim.write_text("content")
    (tmp_path / LOCK_FILE).symlink_to(victim)
    with pytest.raises(OutputError), locked_folder(tmp_path):
        pass
    assert victim.read_text() == "content"


@pytest.mark.parametrize("kind", ["hard link", "symbolic link", "content", "folder", "pipe"])
def test_a_planted_lock_file_was_written_through(tmp_path: Path, kind: str) -> None:
    """A hard link under the name of the lock file: its target was truncated and got our process id."""
    victim, lock = tmp_path / "victim", tmp_path / "out" / LOCK_FILE
    victim.write_text("important")
    lock.parent.mkdir()
    if kind == "hard link":
        os.link(victim, lock)
    elif kind == "symbolic link":
        lock.symlink_to(victim)
    elif kind == "content":
        lock.write_text("important")
    elif kind == "folder":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    before = lock.lstat()
    with (
        pytest.raises(OutputError, match=r"cannot write to .*out.*Choose another folder"),
        locked_folder(tmp_path / "out"),
    ):
        pass
    assert victim.read_text() == "important"
    assert lock.lstat().st_ino == before.st_ino
    assert kind != "content" or lock.read_text() == "important"


def test_a_lock_file_that_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    """Whole, or killed between making the file and writing the process id."""
    for left in ("", "999999999\n"):
        (tmp_path / LOCK_FILE).write_text(left)
        with locked_folder(tmp_path):
            assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"
        assert names(tmp_path) == []
