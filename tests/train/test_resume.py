"""A run that is killed goes on bit for bit; damaged checkpoints and full disks are one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny_run import tiny_config
from zloss.results.train_config import TrainConfig
from zloss.train.folder.step_log import read_steps
from zloss.train.run import run_training
from zloss.train.run_options import RunOptions
from zloss.train.start.run_start import prepare_start

KILLED = """
import json, os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from zloss.results.train_config import TrainConfig
from zloss.train.run import run_training
from zloss.train.run_options import RunOptions
from zloss.train.start.run_start import prepare_start

class Killer:
    @contextmanager
    def run(self, name, steps, done):
        yield self

    def show(self, record, tokens):
        if record.step == int(sys.argv[3]):
            os.kill(os.getpid(), int(sys.argv[4]))

fields = json.loads(sys.argv[1])
config = TrainConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
limit = int(sys.argv[5])
start = prepare_start(config)
if limit:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
run_training(config, start, Path(sys.argv[2]), options=RunOptions(checkpoint_every=4), view=Killer())
"""


def in_process(
    config: TrainConfig, folder: Path, *, at: int, with_signal: int = signal.SIGKILL, limit: int = 0
) -> subprocess.CompletedProcess[str]:
    """The run in a process of its own, sent a signal after step `at`."""
    words = [
        sys.executable,
        "-c",
        KILLED,
        json.dumps(asdict(config)),
        str(folder),
        str(at),
        str(int(with_signal)),
        str(limit),
    ]
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}, check=False)


def outcome(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    steps = [replace(record, seconds=None) for record in read_steps(folder)]
    return steps, json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, tuple[list[Any], dict[str, Any]]]:
    """A model with dropout, trained without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder, method="centered", coef=1e-3)
    run_training(config, prepare_start(config), folder / "run", options=RunOptions(checkpoint_every=4))
    return config, outcome(folder / "run")


def test_killed_runs_go_on_bit_for_bit(whole: tuple[TrainConfig, Any], tmp_path: Path) -> None:
    config, wanted = whole
    killed = in_process(config, tmp_path / "run", at=7)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(read_steps(tmp_path / "run")) == 7
    assert not (tmp_path / "run" / "metrics.json").exists()
    shown: list[int] = []
    run_training(
        config, prepare_start(config), tmp_path / "run", options=RunOptions(checkpoint_every=4), view=_Steps(shown)
    )
    assert shown == list(range(5, 13))
    assert outcome(tmp_path / "run") == wanted
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_cut_off_checkpoint_is_detected_and_the_one_before_is_used(
    whole: tuple[TrainConfig, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, wanted = whole
    killed = in_process(config, tmp_path / "run", at=10)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    newest = tmp_path / "run" / "checkpoints" / "step-0000008" / "optimizer.bin"
    newest.write_bytes(newest.read_bytes()[:-100])
    shown: list[int] = []
    run_training(
        config, prepare_start(config), tmp_path / "run", options=RunOptions(checkpoint_every=4), view=_Steps(shown)
    )
    assert shown[0] == 5
    assert "step-0000008 is damaged" in capsys.readouterr().err
    assert outcome(tmp_path / "run") == wanted


def test_interrupts_keep_the_last_step(whole: tuple[TrainConfig, Any], tmp_path: Path) -> None:
    config, wanted = whole
    stopped = in_process(config, tmp_path / "run", at=6, with_signal=signal.SIGINT)
    assert "KeyboardInterrupt" in stopped.stderr
    shown: list[int] = []
    run_training(
        config, prepare_start(config), tmp_path / "run", options=RunOptions(checkpoint_every=4), view=_Steps(shown)
    )
    assert shown[0] == 7
    assert outcome(tmp_path / "run") == wanted


def test_a_full_disk_is_one_sentence(whole: tuple[TrainConfig, Any], tmp_path: Path) -> None:
    """A limit on the size of files makes every large write fail, as a full disk would."""
    config, _ = whole
    failed = in_process(config, tmp_path / "run", at=99, limit=50_000)
    assert failed.returncode == 1
    assert "OutputError: cannot write a checkpoint" in failed.stderr.strip().splitlines()[-1]
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


class _Steps:
    """Notes the steps that are really taken."""

    def __init__(self, shown: list[int]) -> None:
        self._shown = shown

    def run(self, name: str, steps: int, done: int) -> _Steps:
        return self

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, record: Any, tokens: int) -> None:
        self._shown.append(record.step)
