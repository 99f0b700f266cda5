"""`zloss center` loses nothing: not the original, not another process's copy, and no copy appears before it was measured."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.faults.child import Child, debris, run, warm_up
from tests.faults.write_events import count_writes, kill_at_write
from tests.tiny_gguf import tiny_tensors, write_gguf
from tests.tiny_models import save_model
from zloss.cli.main import main
from zloss.results.folder import LOCK_FILE, locked_folder

QUICK = ["--blocks", "2", "--block-size", "32", "--quiet"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    warm_up()
    import zloss.protocol.center  # noqa: F401

    return save_model("granite", tmp_path_factory.mktemp("models") / "granite")


def words(model: Path, out: str | Path) -> list[str]:
    return ["center", str(model), *QUICK, "--out", str(out)]


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_two_centerings_into_one_folder_both_exited_with_0(model: Path, tmp_path: Path) -> None:
    """The copy of one model replaced that of the other, and neither process said so."""
    models = [model, save_model("neox", tmp_path / "neox")]
    out = tmp_path / "out"
    pair = [Child(words(each, out)) for each in models]
    ended = [child.wait().check_contract() for child in pair]
    assert sorted(each.code or 0 for each in ended) == [0, 2], ended
    (winner,) = [each for each, end in zip(models, ended, strict=True) if end.code == 0]
    assert json.loads((out / "centering.json").read_text())["model"] == winner.name
    assert debris(tmp_path) == []


def test_a_folder_that_another_process_writes_to_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked_folder(out):
        for more in ([], ["--force"]):
            second = run([*words(model, out), *more]).check_contract()
            assert second.code == 2
            assert f"{out} is in use by another process of zloss (pid {os.getpid()})" in second.error
        assert [path.name for path in out.iterdir()] == [LOCK_FILE]
    assert run(words(model, out)).code == 0
    assert not (out / LOCK_FILE).exists()


def test_a_folder_that_was_replaced_leaves_the_lock_of_the_next_holder(tmp_path: Path) -> None:
    """The end of a lock removed the lock file of another process that had locked the new folder."""
    out = tmp_path / "out"
    with locked_folder(out):
        out.rename(tmp_path / "old")
        out.mkdir()
        (out / LOCK_FILE).write_text("of another process")
    assert (out / LOCK_FILE).read_text() == "of another process"


@pytest.mark.parametrize("place", ["same", "relative", "link", "below a link", "inside", "above", "linked weights"])
def test_the_original_was_overwritten_with_force(
    model: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    source = Path(shutil.copytree(model, data / "model"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(source)
    if place == "linked weights":
        (tmp_path / "store").mkdir()
        (source / "model.safetensors").rename(tmp_path / "store" / "weights")
        (source / "model.safetensors").symlink_to(tmp_path / "store" / "weights")
    out = {
        "same": str(source),
        "relative": "data/../data/model",
        "link": "link",
        "below a link": "link/copy",
        "inside": "data/model/copies/first",
        "above": "data",
        "linked weights": "store",
    }[place]
    before, entries = content(source), sorted(tmp_path.rglob("*"))
    assert main([*words(source, out), "--force"]) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(r"--out (is|contains) .* (overwritten|changed): choose a", error), error
    assert len(error.splitlines()) == 1
    assert content(source) == before
    assert sorted(tmp_path.rglob("*")) == entries


def test_the_text_or_the_gguf_file_in_the_replaced_folder_was_removed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZLOSS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "text.txt").write_text("one two three " * 500)
    gguf = write_gguf(out / "tiny.gguf", tiny_tensors())
    for command in ([*words(model, out), "--text", str(out / "text.txt")], words(gguf, out)):
        assert main([*command, "--force"]) == 2
        assert "--out contains" in capsys.readouterr().err
    assert {path.name for path in out.iterdir()} == {"text.txt", "tiny.gguf"}
    # Next to the file is a good place.
    assert main(words(gguf, out / "copy")) == 0


def test_the_folder_that_the_command_runs_in_is_refused_before_the_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words(model, ".")) == 2
    assert "choose a folder inside it" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def check_after_kill(model: Path, out: Path) -> str:
    """Nothing or a measured copy is at `out`, and the same command, without --force, ends well. Returns which it was."""
    found = {path.name for path in out.iterdir()} - {LOCK_FILE} if out.exists() else set()
    again = run(words(model, out)).check_contract()
    if found:
        assert {"centering.json", "README.md", "config.json"} <= found
        assert again.code == 2
        assert "is not empty" in again.error
    else:
        assert again.code == 0, again.error
    assert json.loads((out / "centering.json").read_text())["verified"] is True
    assert debris(out.parent) == []
    return "measured copy" if found else "nothing"


def test_a_kill_left_a_copy_that_was_not_measured_and_the_command_was_then_refused(model: Path, tmp_path: Path) -> None:
    """SIGKILL in front of the first writes, of the last ones, where the copy takes its place, and of some between."""
    counted = tmp_path / "writes"
    assert run(words(model, tmp_path / "whole" / "out"), count_writes(tmp_path / "whole", counted)).code == 0
    writes = counted.stat().st_size
    seen = set()
    for number in (1, 3, writes // 3, *range(writes - 9, writes + 1, 2), writes):
        place = tmp_path / f"at{number}"
        assert Child(words(model, place / "out"), kill_at_write(place, number)).wait().killed
        seen.add(check_after_kill(model, place / "out"))
    assert "nothing" in seen


def test_a_kill_while_the_copy_is_measured(model: Path, tmp_path: Path) -> None:
    """The copy is complete and not yet compared: it is not at its place."""
    for delay in (0.0, 0.05, 0.15):
        out = tmp_path / f"after{delay}" / "out"
        child = Child([*words(model, out), "--blocks", "200"])  # a second of measuring, and as long before it
        deadline = time.monotonic() + 120
        while not list(out.parent.glob(".out.*/config.json")) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay)
        assert child.status() is None, "the copy was finished before it was killed"
        assert [path.name for path in out.iterdir()] == [LOCK_FILE]
        child.kill()
        assert child.wait().killed
        assert debris(out.parent)
        assert check_after_kill(model, out) == "nothing"


def test_force_replaces_and_a_failed_run_keeps_what_was_there(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    for more, error in (([], "is not empty"), (["--force", "--valid-vocab", "600"], "--valid-vocab")):
        assert main([*words(model, out), *more]) == 2
        assert error in capsys.readouterr().err
        assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert main([*words(model, out), "--force"]) == 0
    assert not (out / "mine.txt").exists()
    capsys.readouterr()


def test_a_link_as_the_folder_stays_a_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    assert main(words(model, tmp_path / "out")) == 0
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "real" / "centering.json").is_file()
