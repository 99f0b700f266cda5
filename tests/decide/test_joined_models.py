"""Results of different models in one map are said to be so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.laws.example_results import implementation_example
from zloss.cli.main import main
from zloss.decide.decided_results import decide_results
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.files import write_record


def test_results_of_different_models_were_joined_without_a_word(
    report: AuditReport, comparison: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = implementation_example(replace(report, model=replace(report.model, name="gpt2")))
    wanted = (
        f"The joined results are of different models: the audit is of {report.model.name}, the implementation audit is of "
        f"{audit.model.name}, the comparison is of smollm2."
    )
    write_record(tmp_path / "report.json", report)
    write_record(tmp_path / "implementation_audit.json", audit)
    write_record(tmp_path / "comparison.json", replace(comparison, model="smollm2"))
    names = [str(tmp_path / f"{name}.json") for name in ("report", "implementation_audit", "comparison")]
    assert main(["report", *names, "--out", str(tmp_path / "out")]) == 0
    assert wanted in " ".join(capsys.readouterr().out.split())
    assert wanted in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    (only,) = json.loads((tmp_path / "out" / "decisions.json").read_text(encoding="utf-8"))["maps"]
    assert only["models"] == wanted
    # Also without an audit, and beside several.
    assert main(["report", *names[1:], "--out", str(tmp_path / "two")]) == 0
    said = f"the implementation audit is of {audit.model.name}, the comparison is of smollm2."
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "two" / "report.html").read_text(encoding="utf-8")


def test_results_of_one_model_need_no_sentence(report: AuditReport, other: AuditReport, comparison: Comparison) -> None:
    same = replace(comparison, model=report.model.name)
    assert [one.models for one in decide_results((report,), (), (same, comparison)).maps] == [None]
    first, second = decide_results((report, other), (), (same,)).maps
    assert first.models is None
    assert second.models is not None
