"""Small campaigns of faults; `make faults` runs the long ones, and docs/guarantees.md has their figures."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.faults.child import Child, debris, largest_file, run, warm_up, without_home, without_privileges
from tests.faults.scenarios import Scenario, scenarios
from tests.faults.write_events import full_from_write, kill_at_write


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scenario]:
    """The scenarios with the numbers of an undisturbed run."""
    warm_up()
    folder = tmp_path_factory.mktemp("faults")
    found = scenarios(folder / "inputs")
    for scenario in found.values():
        scenario.learn(folder / scenario.name)
    return found


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios set these variables; they are restored for later tests."""
    for name in ("ZLOSS_CACHE", "ZLOSS_SAVE_EVERY"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "share"), [("train", 0.15), ("train", 0.6), ("audit", 0.5), ("conversion", 0.55), ("center", 0.5)]
)
def test_a_command_that_was_killed_at_a_write_resumes(
    known: dict[str, Scenario], tmp_path: Path, name: str, share: float
) -> None:
    scenario, place = known[name], tmp_path / "place"
    child = Child(scenario.start_words(place), kill_at_write(place, round(share * scenario.writes)))
    assert child.wait().killed
    scenario.check_untouched(place)
    scenario.check_again(place)


def test_a_conversion_that_was_killed_leaves_nothing_behind(known: dict[str, Scenario], tmp_path: Path) -> None:
    """Each one leaked the size of its weights into the cache."""
    scenario, place = known["conversion"], tmp_path / "place"
    cache = place / "cache" / "gguf"
    for number in range(1, 40):
        Child(scenario.start_words(place), kill_at_write(cache, number)).wait()
        if cache.exists() and debris(cache):
            break
    assert debris(cache), "no kill fell into the conversion"
    scenario.check_again(place)


def test_a_damaged_conversion_is_made_again(known: dict[str, Scenario], tmp_path: Path) -> None:
    """Weights of the right size and with other bytes were audited as the model."""
    scenario, place = known["conversion"], tmp_path / "place"
    assert run(scenario.start_words(place)).code == 0
    (weights,) = (place / "cache").rglob("model.safetensors")
    content = weights.read_bytes()
    for damaged in (content[:-4] + b"\x00\x00\x80\x3f", content[: len(content) // 2]):
        weights.write_bytes(damaged)
        scenario.check_again(place)
        assert weights.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "size"), [("train", 100), ("train", 3000), ("audit", 3000), ("conversion", 20_000), ("center", 20_000)]
)
def test_a_disk_that_takes_no_large_file(known: dict[str, Scenario], tmp_path: Path, name: str, size: int) -> None:
    scenario, place = known[name], tmp_path / "place"
    ended = run(scenario.start_words(place), largest_file(size)).check_contract()
    assert ended.code == 2
    scenario.check_untouched(place)
    scenario.check_again(place)


@pytest.mark.parametrize(
    ("name", "share", "error"), [("train", 0.05, errno.ENOSPC), ("train", 0.8, errno.ENOSPC), ("audit", 0.1, errno.EIO)]
)
def test_a_disk_that_fills_up_or_breaks_while_a_tracker_a_checkpoint_or_an_audit_writes(
    known: dict[str, Scenario], tmp_path: Path, name: str, share: float, error: int
) -> None:
    """The thread of a tracker printed a separate traceback."""
    place, first = tmp_path / "place", round(share * known[name].writes)
    ended = run(known[name].start_words(place), full_from_write(place, first, error)).check_contract()
    assert ended.code == 2
    assert os.strerror(error) in ended.error


def test_a_user_without_a_home_can_audit(
    known: dict[str, Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No $HOME and no entry in the password file: a traceback before the first line of work."""
    scenario, temporary = known["conversion"], tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    ended = run(scenario.start_words(tmp_path / "place"), without_home).check_contract()
    assert ended.code == 0
    assert scenario.numbers(tmp_path / "place") == scenario.reference
    assert list(temporary.iterdir()) == []  # the conversion was made there


def test_paths_that_may_not_be_entered_and_names_that_are_too_long(tmp_path: Path) -> None:
    warm_up()
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    (tmp_path / "loss.py").write_text("def f(z, y):\n    return z.logsumexp(-1).mean()\n")
    if os.geteuid() == 0:
        os.chown(closed, 54321, 54321)
    closed.chmod(0o000)
    try:
        for bad in (str(closed / "inner"), str(tmp_path / ("n" * 300))):
            for words in (
                ["audit", bad, "--out", str(tmp_path / "out")],
                ["audit", str(tmp_path), "--out", bad],
                ["audit", str(tmp_path), "--text", bad, "--out", str(tmp_path / "out")],
                ["train", bad, "--out", str(tmp_path / "out")],
                ["train", "--from-config", "tiny", "--out", bad],
                ["compare", bad],
                ["report", bad],
                ["drift", bad],
                ["center", bad],
                ["audit-loss", f"{bad}.py:f"],
                ["router-scale", "--layers", "2", "--top-k", "1", "--out", bad],
            ):
                ended = run(words, without_privileges).check_contract()
                assert ended.code == 2, (words, ended)
    finally:
        closed.chmod(0o700)


def test_ctrl_c_is_no_traceback(known: dict[str, Scenario], tmp_path: Path) -> None:
    scenario, place = known["train"], tmp_path / "place"
    child = Child(scenario.start_words(place))
    child.kill_at(0.5 * scenario.seconds, signal.SIGINT)
    assert child.wait().check_contract().code in (0, 130)
    scenario.check_again(place)


def test_a_finished_run_is_tidied_up_and_never_overwritten(known: dict[str, Scenario], tmp_path: Path) -> None:
    """Killed after its metrics were written, it was skipped with its checkpoints; with a cut config.json, trained over."""
    scenario, place = known["train"], tmp_path / "place"
    assert run(scenario.start_words(place)).code == 0
    folder = place / "standard-0.01-s1"
    (folder / ".zloss-lock").write_text("1\n")
    (folder / "checkpoints" / ".step-0000012.part").mkdir(parents=True)
    scenario.check_again(place)
    assert not (folder / "checkpoints").exists()
    config, metrics = (folder / "config.json"), (folder / "metrics.json").read_bytes()
    config.write_bytes(config.read_bytes()[:100])
    ended = run(scenario.start_words(place)).check_contract()
    assert ended.code == 2
    assert "contains a finished run whose settings are unknown" in ended.error
    assert (folder / "metrics.json").read_bytes() == metrics
