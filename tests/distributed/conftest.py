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

from tests.distributed.commands import DROPOUT, audit_words, commands, train_words
from tests.distributed.launch import accelerate, launched, rank_of, torchrun
from tests.train.tiny_run import tiny_config


@dataclass(frozen=True)
class KilledJob:
    """A job whose rank 1 was killed, once or several times."""

    code: int
    told: str
    seen: list[int]
    """What was finished at each kill."""
    seconds: float
    """From the last kill to the end of the job."""


@dataclass(frozen=True)
class OnRanks:
    """Commands of one launch on two processes, by name."""

    codes: dict[str, list[int]]
    """Exit codes of both ranks."""
    said: dict[str, str]
    """Standard error of both."""
    printed: str
    """Standard output of all commands."""


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
    """A training job that may be started anew once: killed at 14 steps, and at 36 after its restart."""
    steps = root / "killed" / "centered-0.001-s1" / "steps.jsonl"

    def written() -> int:
        return steps.read_text().count("\n") if steps.exists() else 0

    words = train_words(root, *DROPOUT, out="killed", model=True)
    launch = [*torchrun(2, "--max-restarts=1"), "-m", "zloss", *words]
    found: KilledJob = once("killed run", lambda: _kill(launch, written, [14, 36]))
    return found


@pytest.fixture(scope="session")
def killed_audit(root: Path, once: Once) -> KilledJob:
    """An audit whose rank 1 is killed once it has saved a batch."""
    parts = root / "killed-audit" / "audit-parts-1-of-2"
    words = audit_words(root, out="killed-audit")
    launch = [*torchrun(2), "-m", "zloss", *words]
    found: KilledJob = once("killed audit", lambda: _kill(launch, lambda: len(list(parts.glob("part-*.npz"))), [1]))
    return found


def _kill(words: list[str], finished: Callable[[], int], wanted: list[int]) -> KilledJob:
    """Kill rank 1 whenever as much is finished as wanted."""
    environment = {**os.environ, "ZLOSS_SAVE_EVERY": "0", "ZLOSS_RANK_TIMEOUT": "60"}
    seen, at, began = [], 0.0, time.monotonic()
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        for least in wanted:
            while (now := finished()) < least and job.poll() is None and time.monotonic() - began < 180:
                time.sleep(0.01)
            process = None if job.poll() is not None else rank_of(job.pid, 1)
            assert process is not None, f"the job was over before its rank could be killed: {job.communicate()}"
            os.kill(process, signal.SIGKILL)
            at = time.monotonic()
            seen.append(now)
        _, told = job.communicate(timeout=180)
    return KilledJob(job.returncode, told, seen, time.monotonic() - at)


@pytest.fixture(scope="session")
def on_ranks(root: Path, once: Once, killed_run: object, killed_audit: object) -> OnRanks:
    """Every command of `commands.py` on two processes, which `accelerate launch` starts."""
    found: OnRanks = once("on ranks", lambda: _run_all(commands(root)))
    return found


def _run_all(made: dict[str, list[str]]) -> OnRanks:
    given = json.dumps(list(made.values()))
    done = launched(2, "tests.distributed.several_commands", given, launcher=accelerate)
    assert done.returncode == 0, done.stderr[-3000:]
    codes = json.loads(done.stdout[done.stdout.index("[[") :])
    # Both ranks announce a command; what they say of it stands between that and the next one.
    said = [part.partition("\n")[2] for part in done.stderr.split("begin ")[1:]]
    joined = ["".join(said[2 * place : 2 * place + 2]) for place in range(len(made))]
    return OnRanks(dict(zip(made, codes, strict=True)), dict(zip(made, joined, strict=True)), done.stdout)
