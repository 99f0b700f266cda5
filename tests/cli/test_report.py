"""`zloss report`: rebuild, side by side, joined; exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import straight_audit
from zloss.cli.main import main
from zloss.decide import answer, decision_map
from zloss.decide.decision_map import decide, with_decisions
from zloss.decide.thresholds import Thresholds
from zloss.report import files
from zloss.results.audit import AuditReport
from zloss.results.decision import Decision
from zloss.results.io import write_json


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders as the commands write them: audits a and b, a loss audit, a comparison."""
    root = tmp_path_factory.mktemp("results")
    for name, seed, shift in (("a", 0, 0.8), ("b", 5, 0.02)):
        measured = straight_audit.tiny_report(seed, name=f"model-{name}", shift=shift)
        report = with_decisions(AuditReport.from_dict(measured))
        write_json(root / name / "report.json", report.to_dict())
    tokens, _, _ = straight_audit.run_tiny(straight_audit.tiny_model())
    write_json(root / "loss" / "report.json", straight_audit.loss_audit(tokens, torch.bfloat16))
    write_json(root / "runs" / "comparison.json", straight_audit.comparison({"ce": 0.0, "standard": 1e-2}))
    return root


def test_the_page_of_one_audit_is_rebuilt_in_its_folder(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (results / "a" / "report.json").read_bytes()
    assert main(["report", str(results / "a"), "--verbose"]) == 0
    file = results / "a" / "report.html"
    assert "model-a" in file.read_text(encoding="utf-8")
    first = file.read_bytes()
    file.unlink()
    assert main(["report", str(results / "a" / "report.json"), "--quiet"]) == 0
    assert file.read_bytes() == first
    assert (results / "a" / "report.json").read_bytes() == before
    out = capsys.readouterr().out
    assert "P_Z^99.9" in out
    assert out.count("Decision map") == 1


def test_two_audits_stand_side_by_side(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(results / "a"), str(results / "b"), "--out", str(tmp_path)]) == 0
    assert "Decisions side by side" in (tmp_path / "report.html").read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert "model-a" in out
    assert "model-b" in out
    maps = json.loads((tmp_path / "decisions.json").read_text())["maps"]
    fired = {item["audit"]: item["decisions"][0]["fired"] for item in maps}
    assert fired == {"model-a": True, "model-b": False}


def test_three_kinds_of_results_fill_all_eight_stages(results: Path, tmp_path: Path) -> None:
    names = [str(results / name) for name in ("a", "loss", "runs")]
    assert main(["report", *names, "--out", str(tmp_path), "--quiet"]) == 0
    record = json.loads((tmp_path / "decisions.json").read_text())
    (only,) = record["maps"]
    assert len(only["decisions"]) == 8
    assert all(decision["fired"] is not None for decision in only["decisions"])
    assert record["results"] == ["a/report.json", "loss/report.json", "runs/comparison.json"]


def test_each_map_is_decided_once(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the page is rendered several times, with fewer tokens each time, until it is small enough."""
    decided = []

    def counted(report: AuditReport | None, **options: Any) -> tuple[Decision, ...]:
        decided.append(report)
        return decide(report, **options)

    monkeypatch.setattr(decision_map, "decide", counted)
    monkeypatch.setattr(answer, "decide", counted)
    monkeypatch.setattr(files, "MAX_BYTES", 1)
    for names in (("a", "b", "loss", "runs"), ("loss", "runs")):
        decided.clear()
        words = [str(results / name) for name in names]
        assert main(["report", *words, "--out", str(tmp_path), "--quiet"]) == 0
        assert len(decided) == max(1, len({"a", "b"} & set(names)))


def test_thresholds_are_set_by_name(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path), "--quiet"]
    assert main(["report", str(results / "a"), "--shift-over-log-v", "1000", "--gain-99", "0", *out]) == 0
    stages = json.loads((tmp_path / "decisions.json").read_text())["maps"][0]["decisions"]
    assert {stage["stage"]: stage["fired"] for stage in stages[:3:2]} == {
        "Source coordinate": False,
        "Architectural transport": True,
    }
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{field.name.replace('_', '-')}" in shown for field in fields(Thresholds))


def test_figures_are_written_on_request(results: Path, tmp_path: Path) -> None:
    names = [str(results / "a"), str(results / "b")]
    assert main(["report", *names, "--out", str(tmp_path), "--figures", "--formats", "svg", "--quiet"]) == 0
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.svg"))
    assert found == [f"figures/model-{m}/{f}.svg" for m in "ab" for f in ("gradient_geometry", "spectrum", "tails")]


def test_a_partial_report_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(AuditReport.from_dict(straight_audit.tiny_report()), status="partial", finished_blocks=3)
    write_json(tmp_path / "report.json", report.to_dict())
    assert main(["report", str(tmp_path)]) == 0
    assert "interrupted" in capsys.readouterr().out
    assert "--resume" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_command_needs_no_torch(results: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from zloss.cli.main import main; "
        f"main(['report', {str(results / 'a')!r}, '--out', {str(tmp_path)!r}, '--quiet']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
