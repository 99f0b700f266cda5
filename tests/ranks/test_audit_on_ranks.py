"""`torchrun -m zloss audit`: every block on one rank, the report of one process, and what a lost rank leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import rank_of, torchrun
from tests.tiny_models import save_model
from zloss.ranks.job import Job
from zloss.text.corpus import pydoc_topics

OPTIONS = ["--blocks", "21", "--block-size", "48", "--batch-blocks", "4", "--gradient-blocks", "3", "--no-figures"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("inputs")
    text = root / "topics.txt"
    text.write_text("\n\n".join(pydoc_topics()[:30]))
    return save_model("gpt2", root / "model"), text


def command(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable, "-m", "zloss"]
    return [*torchrun(ranks), "-m", "zloss"]


def audit(ranks: int, inputs: tuple[Path, Path], out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    model, text = inputs
    words = [*command(ranks), "audit", str(model), "--text", str(text), *OPTIONS, "--out", str(out), *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=280)


def numbers(value: Any, path: str = "") -> dict[str, float]:
    """Every number of a report by its place, without the time it took."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if key not in ("provenance", "timings")}
        return {name: n for key, inner in kept.items() for name, n in numbers(inner, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {name: n for i, inner in enumerate(value) for name, n in numbers(inner, f"{path}[{i}]").items()}
    return {path: value} if isinstance(value, int | float) and not isinstance(value, bool) else {}


@pytest.fixture(scope="module")
def alone(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The numbers of one process."""
    out = tmp_path_factory.mktemp("alone")
    assert audit(1, inputs, out).returncode == 0
    return numbers(json.loads((out / "report.json").read_text()))


@pytest.mark.parametrize("count", [1, 5, 21, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_block_is_on_one_rank(count: int, ranks: int) -> None:
    shares = [Job(rank, ranks).own_range(count, 4) for rank in range(ranks)]
    assert [block for share in shares for block in share] == list(range(count))
    assert all(share.start % 4 == 0 or not share for share in shares)


def test_ranks_give_the_report_of_one_process(
    inputs: tuple[Path, Path], alone: dict[str, float], tmp_path: Path
) -> None:
    want = alone
    assert len(want) > 200
    for ranks in (2, 3):
        done = audit(ranks, inputs, tmp_path / str(ranks))
        assert done.returncode == 0, done.stderr[-2000:]
        got = numbers(json.loads((tmp_path / str(ranks) / "report.json").read_text()))
        assert got.keys() == want.keys()
        far = {name: (got[name], want[name]) for name in want if got[name] != pytest.approx(want[name], rel=1e-12)}
        assert not far
        assert not list((tmp_path / str(ranks)).glob("audit-state*"))
        # One process speaks.
        assert done.stdout.count("report.html") == 1


def test_a_killed_rank_ends_the_job_and_it_goes_on(
    inputs: tuple[Path, Path], alone: dict[str, float], tmp_path: Path
) -> None:
    model, text = inputs
    out = tmp_path / "killed"
    words = [*command(2), "audit", str(model), "--text", str(text), *OPTIONS, "--out", str(out)]
    # Every batch is saved; rank 1 stops itself after its second batch, where a watcher kills it.
    environment = {**os.environ, "ZLOSS_SAVE_EVERY": "0", "ZLOSS_RANK_TIMEOUT": "60"}
    started = time.monotonic()
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        state = out / "audit-state-1-of-2.npz"
        while not state.exists() and job.poll() is None and time.monotonic() - started < 120:
            time.sleep(0.02)
        killed = rank_of(job.pid, 1)
        if killed is not None:
            os.kill(killed, signal.SIGKILL)
        _, told = job.communicate(timeout=120)
    assert killed is not None, "the job was over before its rank could be killed"
    assert job.returncode != 0
    assert not (out / "report.json").exists()
    assert "SIGKILL" in told or "Signal 9" in told
    done = audit(2, inputs, out, "--resume")
    assert done.returncode == 0, done.stderr[-2000:]
    got = numbers(json.loads((out / "report.json").read_text()))
    assert {name for name in alone if got[name] != pytest.approx(alone[name], rel=1e-12)} == set()


def test_a_command_that_knows_no_ranks_refuses_them() -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    words = [sys.executable, "-m", "zloss", "compare", "nowhere"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert "one process" in done.stderr
