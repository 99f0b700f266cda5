"""What the tests of `zloss` on several processes share: two jobs that lose a rank, and one launch for all other commands."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.commands import DROPOUT, audit_argv, commands, train_argv
from tests.distributed.launch import accelerate, rank_of, torchrun
from tests.train.tiny_run import tiny_config


@dataclass(frozen=True)
class KilledJob:
    """A job whose rank 1 was killed, once or several times."""

    code: int
    stderr: str
    seen: list[int]
    """What was finished at each kill."""
    seconds: float
    """From the last kill to the end of the job."""


@dataclass(frozen=True)
class OnRanks:
    """Commands of one launch on two processes, by name."""

    codes: dict[str, list[int]]
    """Exit codes of both ranks."""
    stderr: dict[str, str]
    """Of both ranks."""
    stdout: str
    """Of all commands."""


class Once:
    """Makes a value in one of the processes of pytest-xdist; the others read it. A launch takes 16 to 21 seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, name: str, make: Callable[[], Any]) -> Any:
        kept = self.folder / f"{name}.pickle"
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_bytes(pickle.dumps(make()))
            return pickle.loads(kept.read_bytes())


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    base = tmp_path_factory.getbasetemp()
    return Once((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks")


@pytest.fixture(scope="session")
def root(once: Once) -> Path:
    """The folder of all inputs and outputs."""
    once("inputs", lambda: tiny_config(once.folder / "in"))
    return once.folder


@pytest.fixture(scope="session")
def killed_run(root: Path, once: Once) -> KilledJob:
    """A training job that may be restarted once: killed at 14 steps, and at 36 after its restart."""
    steps = root / "killed" / "centered-0.001-s1" / "steps.jsonl"

    def written() -> int:
        return steps.read_text().count("\n") if steps.exists() else 0

    argv = train_argv(root, *DROPOUT, out="killed", model=True)
    launch = [*torchrun(2, "--max-restarts=1"), "-m", "zloss", *argv]
    found: KilledJob = once("killed run", lambda: _kill(launch, written, [14, 36]))
    return found


@pytest.fixture(scope="session")
def killed_audit(root: Path, once: Once) -> KilledJob:
    """An audit whose rank 1 is killed once it has saved a batch."""
    parts = root / "killed-audit" / "audit-parts-1-of-2"
    launch = [*torchrun(2), "-m", "zloss", *audit_argv(root, out="killed-audit")]
    found: KilledJob = once("killed audit", lambda: _kill(launch, lambda: len(list(parts.glob("part-*.npz"))), [1]))
    return found


def _kill(argv: list[str], finished: Callable[[], int], wanted: list[int]) -> KilledJob:
    """Kill rank 1 whenever as much is finished as wanted."""
    environment = {**os.environ, "ZLOSS_SAVE_EVERY": "0", "ZLOSS_RANK_TIMEOUT": "60"}
    seen, at, began = [], 0.0, time.monotonic()
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        for least in wanted:
            while (now := finished()) < least and job.poll() is None and time.monotonic() - began < 180:
                time.sleep(0.01)
            process = None if job.poll() is not None else rank_of(job.pid, 1)
            assert process is not None, f"the job was over before its rank could be killed: {job.communicate()}"
            os.kill(process, signal.SIGKILL)
            at = time.monotonic()
            seen.append(now)
        _, stderr = job.communicate(timeout=180)
    return KilledJob(job.returncode, stderr, seen, time.monotonic() - at)


@pytest.fixture(scope="session")
def on_ranks(root: Path, once: Once, killed_run: object, killed_audit: object) -> OnRanks:
    """Every command of `commands.py` on two processes, which `accelerate launch` starts."""
    found: OnRanks = once("on ranks", lambda: _run_all(commands(root)))
    return found


def _run_all(named: dict[str, list[str]]) -> OnRanks:
    argv = [*accelerate(2), "-m", "tests.distributed.commands", json.dumps(list(named.values()))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    codes = json.loads(done.stdout[done.stdout.index("[[") :])
    # Both ranks announce a command, so what they write about it is between that line and the next one.
    parts = [part.partition("\n")[2] for part in done.stderr.split("begin ")[1:]]
    stderr = ["".join(parts[2 * place : 2 * place + 2]) for place in range(len(named))]
    return OnRanks(dict(zip(named, codes, strict=True)), dict(zip(named, stderr, strict=True)), done.stdout)
