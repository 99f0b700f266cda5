"""`zloss audit-implementation` from the outside: files, table, exit codes, and what `zloss report` makes of its result."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from zloss.cli.main import main

QUICK = ["--blocks", "2", "--block-size", "24", "--implementations", "dense,torch-ce,chunked-linear", "--coef", "1e-2"]


@pytest.fixture(scope="module")
def result(gpt2: Path, topics: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of an audit and what it printed."""
    out = tmp_path_factory.mktemp("out") / "implementation"
    words = ["audit-implementation", str(gpt2), "--text", str(topics), "--out", str(out), *QUICK]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(words) == 0
    return out, printed.getvalue()


def stages(folder: Path) -> dict[str, Any]:
    (only,) = json.loads((folder / "decisions.json").read_text())["maps"]
    return {decision["stage"]: decision for decision in only["decisions"]}


def test_the_command_writes_a_record_a_page_and_a_table(result: tuple[Path, str]) -> None:
    folder, printed = result
    record = json.loads((folder / "implementation_audit.json").read_text())
    assert record["schema"] == "zloss.implementation-audit/1"
    assert record["corpus"]["predictions"] == 48
    assert record["provenance"]["command"].startswith("zloss audit-implementation ./")
    assert str(folder.parent) not in json.dumps(record["provenance"])
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Audit of the implementation" in page
    assert "F.cross_entropy + manual Z" in page
    for section in ("Stored logits", "Implementations", "Update", "fp16"):
        assert section in printed
    assert "● fired  Implementation " in printed
    lines = printed.splitlines()
    tables = [line for line in lines if not line.startswith("/") and "●" not in line and "○" not in line]
    assert max(len(line) for line in tables[:-1]) <= 80
    assert "…" not in printed


def test_report_reads_it_and_both_stages_see_it(result: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = result
    assert main(["report", str(folder), "--out", str(tmp_path), "--quiet"]) == 0
    decided = stages(tmp_path)
    implementation = decided["Implementation"]
    assert implementation["fired"] is True
    assert "stored in bf16" in implementation["reason"]
    assert "Δ_θ" in implementation["reason"]
    # A margin within its limit says nothing about training runs, so the stage stays open and says both.
    assert decided["Optimizer consequence"]["fired"] is None
    assert "largest safe fp16 scale" in decided["Optimizer consequence"]["reason"]
    assert "which is within its limit" in decided["Optimizer consequence"]["reason"]
    assert "zloss compare" in decided["Optimizer consequence"]["reason"]
    limits = ["--delta-src", "1", "--delta-theta", "1", "--fp16-margin-ratio", "0.5"]
    assert main(["report", str(folder), "--out", str(tmp_path), "--quiet", *limits]) == 0
    decided = stages(tmp_path)
    assert decided["Implementation"]["fired"] is False
    assert decided["Optimizer consequence"]["fired"] is True
    assert "κ" in decided["Optimizer consequence"]["reason"]
    assert decided["Optimizer consequence"]["measured"]


def test_ctrl_c_leaves_a_partial_record_and_exit_code_130(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zloss.audit.implementation.run.update_audit", interrupt)
    assert main(["audit-implementation", str(gpt2), "--out", str(tmp_path), *QUICK]) == 130
    record = json.loads((tmp_path / "implementation_audit.json").read_text())
    assert record["status"] == "partial"
    assert record["source"]
    assert record["overflow"] == []
    assert "interrupted" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--quiet"]) == 0
