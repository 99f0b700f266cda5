"""A folder of results has one writer at a time, and a lock whose holder was killed binds nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zloss.errors import InputError, OutputError
from zloss.results.folder import LOCK_FILE, locked_folder

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
