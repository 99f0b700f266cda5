"""`torchrun -m zloss audit`: every block on one rank, the report of one process, and what a lost rank leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.distributed.commands import audit_argv, differing, entries
from tests.distributed.conftest import KilledJob, OnRanks
from tests.forked import forked_ranks
from zloss.cli.main import main
from zloss.jobs import Job

pytestmark = pytest.mark.timeout(900)  # the launches that these tests share count for the first of them


def tokens_in(folder: Path) -> dict[str, list[Any]]:
    """Every column of the token table."""
    found: dict[str, list[Any]] = parquet.read_table(folder / "tokens.parquet").to_pydict()
    return found


def report_in(folder: Path) -> dict[str, Any]:
    """Every entry of a report, without what differs between any two runs."""
    return entries(json.loads((folder / "report.json").read_text()), without=("provenance", "timings"))


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, Any]:
    """The report of one process."""
    assert main(audit_argv(root, "--quiet", out="alone-audit")) == 0
    return report_in(root / "alone-audit")


@pytest.mark.parametrize("count", [1, 5, 21, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_block_is_on_one_rank(count: int, ranks: int) -> None:
    shares = [Job(rank, ranks).local_range(count, 4) for rank in range(ranks)]
    assert [block for share in shares for block in share] == list(range(count))
    assert all(share.start % 4 == 0 or not share for share in shares)


def test_two_ranks_give_the_report_of_one_process(root: Path, on_ranks: OnRanks, alone: dict[str, Any]) -> None:
    assert sum(type(value) in (int, float) for value in alone.values()) > 200
    assert on_ranks.codes["audit"] == [0, 0], on_ranks.stderr["audit"]
    assert differing(report_in(root / "audit"), alone, 1e-12) == {}
    assert not list((root / "audit").glob("audit-parts*"))
    assert tokens_in(root / "audit") == tokens_in(root / "alone-audit")
    # Only the first rank prints.
    assert on_ranks.stdout.count("report.html") == 1


def test_three_ranks_give_the_report_of_one_process(root: Path, alone: dict[str, Any]) -> None:
    stdout = forked_ranks(3, lambda: main(audit_argv(root, out="three")))
    assert differing(report_in(root / "three"), alone, 1e-12) == {}
    assert stdout.count("report.html") == 1


def test_a_device_map_is_refused_on_several_ranks(root: Path, on_ranks: OnRanks) -> None:
    assert on_ranks.codes["placed audit"] == [2, 2]
    assert on_ranks.stderr["placed audit"].count("start the audit without torchrun") == 1
    assert not (root / "placed" / "report.json").exists()


def test_an_error_of_all_ranks_is_one_sentence(on_ranks: OnRanks) -> None:
    assert on_ranks.codes["no text"] == [2, 2]
    assert on_ranks.stderr["no text"].count("nowhere.txt") == 1


def test_a_killed_rank_ends_the_job_and_the_audit_resumes(
    root: Path, killed_audit: KilledJob, on_ranks: OnRanks, alone: dict[str, Any]
) -> None:
    assert killed_audit.code != 0
    assert killed_audit.seconds < 60
    assert "SIGKILL" in killed_audit.stderr or "Signal 9" in killed_audit.stderr
    assert "zloss audit: rank 0 of 2" in killed_audit.stderr
    assert "the same command resumes from there" in killed_audit.stderr
    assert on_ranks.codes["killed audit"] == [0, 0], on_ranks.stderr["killed audit"]
    assert differing(report_in(root / "killed-audit"), alone, 1e-12) == {}
    assert tokens_in(root / "killed-audit") == tokens_in(root / "alone-audit")


def test_an_audit_that_the_launcher_restarted_resumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    resumed: list[bool] = []

    class Restarted(Job):
        def from_first(self, make: Any, *args: Any, **keywords: Any) -> Any:
            return make(*args, **keywords)

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr("zloss.jobs.open_job", lambda: nullcontext(Restarted(0, 2)))
    monkeypatch.setattr("zloss.audit.checkpoint.run.run_audit_of", lambda *args, resume, **more: resumed.append(resume))
    assert main(["audit", "--out", str(tmp_path / "out")]) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert main(["audit", "--out", str(tmp_path / "out")]) == 0
    assert resumed == [True, False]


def test_a_command_that_knows_no_ranks_refuses_them() -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    argv = [sys.executable, "-m", "zloss", "compare", "nowhere"]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert "one process" in done.stderr
