"""The tables of docs/audit_loss.md and the benchmark that measures their losses have the same lines."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def titles(text: str, heading: str) -> list[str]:
    """First cells of the table under a heading."""
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][1:]


def test_every_line_of_the_table_is_measured_on_losses_that_exist() -> None:
    bench = runpy.run_path(str(ROOT / "benchmarks/bench_audit_loss.py"))
    text = (ROOT / "docs/audit_loss.md").read_text(encoding="utf-8")
    told, not_told = titles(text, "What it can identify"), titles(text, "What it cannot tell")
    assert min(len(told), len(not_told)) > 10
    beginnings = list(bench["LINES"])
    assert [title for title in told if not any(title.startswith(begin) for begin in beginnings)] == []
    assert [begin for begin in beginnings if not any(title.startswith(begin) for title in told + not_told)] == []
    for names in bench["LINES"].values():
        for name in names:
            bench["case"](name)
