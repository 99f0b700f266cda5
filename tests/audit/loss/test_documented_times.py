"""The table of docs/audit_loss.md and the benchmark that measures its last column have the same lines."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_line_of_the_table_is_measured_on_losses_that_exist() -> None:
    bench = runpy.run_path(str(ROOT / "benchmarks/bench_audit_loss.py"))
    text = (ROOT / "docs/audit_loss.md").read_text(encoding="utf-8")
    table = text.partition("## What can be told")[2].partition("| **out of reach**")[0]
    titles = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    timed = [title for title in titles if title and not title.startswith("**")]
    assert len(timed) > 20
    beginnings = list(bench["LINES"])
    assert [title for title in timed if not any(title.startswith(begin) for begin in beginnings)] == []
    assert [begin for begin in beginnings if not any(title.startswith(begin) for title in timed)] == []
    for names in bench["LINES"].values():
        for name in names:
            bench["case"](name)
