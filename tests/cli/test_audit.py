"""`zloss audit` from the outside: files, exit codes, one sentence for every mistake, Ctrl-C and resume."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.child import Child, largest_file, run
from zloss.cli.main import main

QUICK = ["--blocks", "6", "--block-size", "32", "--gradient-blocks", "2"]


def test_an_audit_writes_its_report_and_prints_its_table(
    gpt2: Path, topics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "audit"
    assert main(["audit", str(gpt2), "--text", str(topics), "--out", str(out), *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "P_Z^99.9" not in printed
    last = printed.splitlines()[-1].strip()
    assert last.startswith("zloss ")
    assert str(gpt2) in last
    report = json.loads((out / "report.json").read_text())
    assert report["schema"] == "zloss.audit/1"
    assert report["corpus"]["predictions"] == 6 * 32
    assert len(report["decisions"]) == 8
    assert report["verdict"]["sentence"] in " ".join(printed.split())
    assert str(tmp_path) not in json.dumps(report["provenance"])
    assert (out / "report.html").stat().st_size < 3_000_000
    assert list((out / "figures").glob("*.svg"))
    assert main(["report", str(out), "--quiet"]) == 0


def test_ctrl_c_leaves_a_partial_report_and_resume_finishes_it(gpt2: Path, topics: Path, tmp_path: Path) -> None:
    words = [str(gpt2), "--text", str(topics), "--out", str(tmp_path), "--blocks", "200", "--block-size", "64"]
    words += ["--batch-blocks", "1", "--quiet", "--gradient-blocks", "1", "--no-figures"]
    process = Child(["audit", *words], lambda: os.environ.update(ZLOSS_SAVE_EVERY="0"))
    parts = tmp_path / "audit-parts"
    deadline = time.monotonic() + 120
    while not list(parts.glob("part-*.npz")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill(signal.SIGINT)
    ended = process.wait()
    assert ended.code == 130, ended.error
    assert "--resume" in ended.error
    partial = json.loads((tmp_path / "report.json").read_text())
    assert partial["status"] == "partial"
    assert 0 < partial["finished_blocks"] < 200
    assert partial["corpus"]["predictions"] == 64 * partial["finished_blocks"]
    assert main(["audit", *words, "--resume"]) == 0
    resumed = json.loads((tmp_path / "report.json").read_text())
    assert resumed["status"] == "complete"
    assert main(["audit", *words, "--out", str(tmp_path / "whole")]) == 0
    whole = json.loads((tmp_path / "whole" / "report.json").read_text())
    assert resumed["heads"] == whole["heads"]
    assert resumed["ppl"] == whole["ppl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a filesystem that is full")
def test_a_full_disk_is_one_sentence(gpt2: Path, tmp_path: Path) -> None:
    """A tiny file system in a user namespace would need privileges; a limit on file size fails writes the same way."""
    words = ["audit", str(gpt2), "--quiet", "--out", str(tmp_path / "full"), *QUICK]
    done = run(words, largest_file(2000)).check_contract()
    assert done.code == 2, done.error
    assert "cannot write" in done.error
    assert not [path for path in (tmp_path / "full").rglob("*") if path.is_file()]
