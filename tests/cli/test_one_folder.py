"""Two processes of `zloss` in one folder: the second exits with one sentence, and the first is not disturbed."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.faults.child import Child
from tests.train.tiny_run import SCRATCH
from zloss.cli.main import main
from zloss.results.folder import LOCK_FILE, locked_folder

STEPS = 40


def train_words(text: Path, out: Path) -> list[str]:
    words = ["train", *SCRATCH, "--methods", "ce", "--text", str(text), "--steps", str(STEPS), "--trackers", "none"]
    return [*words, "--checkpoint-every", "10", "--out", str(out)]


@pytest.fixture(scope="module")
def finished(topics: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("finished") / "runs"
    assert main([*train_words(topics, out), "--quiet"]) == 0
    return out


def steps(out: Path) -> list[int]:
    lines = (out / "ce-0-s1" / "steps.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_two_trainings_in_one_folder(tmp_path: Path, topics: Path) -> None:
    """One of the two used to die, or the other's log was truncated and the run later skipped as finished."""
    out = tmp_path / "runs"
    pair = [Child(train_words(topics, out)) for _ in range(2)]
    ended = [child.wait() for child in pair]
    assert sorted(each.check_contract().code or 0 for each in ended) in ([0, 2], [0, 0]), ended
    for each in ended:
        if each.code == 2:
            assert f"{out / 'ce-0-s1'} is in use by another process of zloss (pid" in each.error
    assert steps(out) == list(range(1, STEPS + 1))
    assert not (out / "ce-0-s1" / LOCK_FILE).exists()
    assert main(["compare", str(out), "--quiet"]) == 0


def test_a_second_training_changes_nothing_and_a_killed_first_one_leaves_no_lock(
    tmp_path: Path, topics: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    run = out / "ce-0-s1"
    long = [word if word != str(STEPS) else "100000" for word in train_words(topics, out)]
    first = Child(long)
    try:
        deadline = time.time() + 120
        while not (run / "steps.jsonl").exists() and time.time() < deadline:
            time.sleep(0.05)
        before = (run / "config.json").read_bytes()
        assert main(long) == 2
        error = capsys.readouterr().err.strip()
        assert f"(pid {first.pid})" in error
        assert len(error.splitlines()) == 1
        assert (run / "config.json").read_bytes() == before
    finally:
        first.kill()
        first.wait()
    assert (run / LOCK_FILE).exists()
    assert main(train_words(topics, out)) == 2  # another number of steps, not the lock
    assert "other settings" in capsys.readouterr().err
    (run / "config.json").unlink()
    assert main([*train_words(topics, out), "--quiet"]) == 0
    assert steps(out) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("length", [0, STEPS - 1, STEPS + 1])
def test_a_log_of_another_length_is_refused_and_trained_again(
    tmp_path: Path, topics: Path, finished: Path, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "runs"))
    words = [*train_words(topics, out), "--quiet"]
    assert main(words) == 0  # nothing is left to do
    log = out / "ce-0-s1" / "steps.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join((lines + lines[-1:])[:length]))
    assert main(["compare", str(out), "--quiet"]) == 2
    assert f"steps.jsonl holds {length} lines, but the run has {STEPS} steps" in capsys.readouterr().err
    assert main(words) == 0
    assert steps(out) == list(range(1, STEPS + 1))


def test_two_audits_in_one_folder(gpt2: Path, tmp_path: Path, topics: Path) -> None:
    out = tmp_path / "audit"
    words = ["audit", str(gpt2), "--text", str(topics), "--out", str(out), "--no-figures", "--quiet"]
    words += ["--blocks", "4", "--block-size", "32"]
    with locked_folder(out):
        second = Child(words).wait().check_contract()
        assert second.code == 2
        assert f"{out} is in use by another process of zloss (pid {os.getpid()})" in second.error
        assert [path.name for path in out.iterdir()] == [LOCK_FILE]
    assert main(words) == 0
    assert (out / "report.json").exists()
    assert not (out / LOCK_FILE).exists()
