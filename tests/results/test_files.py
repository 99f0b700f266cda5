"""Results on disk: told apart by schema, refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.laws.example_results import example_results
from zloss.decide.answer import decide_records
from zloss.errors import InputError
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.files import load_results, read_record, write_record
from zloss.results.loss_audit import LossAudit
from zloss.results.provenance import recorded_command


def test_kinds_are_told_apart_and_foreign_json_is_passed_over(
    report: AuditReport, loss_audit: LossAudit, comparison: Comparison, tmp_path: Path
) -> None:
    write_record(tmp_path / "report.json", report)
    write_record(tmp_path / "loss.json", loss_audit)
    write_record(tmp_path / "comparison.json", comparison)
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "decisions.json").write_text('{"schema": "zloss.decisions/1"}')
    results = load_results([tmp_path])
    kinds = {result.path.name: result.kind for result in results}
    assert kinds == {"report.json": "audit", "loss.json": "loss-audit", "comparison.json": "comparison"}
    decided = decide_records(result.record for result in results)
    assert decided.audits[0].heads == report.heads
    assert decided.loss_audits == (loss_audit,)
    assert [one.methods for one in decided.comparisons] == [comparison.methods]
    assert read_record(tmp_path / "comparison.json", Comparison) == comparison
    with pytest.raises(InputError, match="no result was given"):
        load_results([])


def test_a_record_is_read_from_its_own_schema_only(comparison: Comparison, tmp_path: Path) -> None:
    write_record(tmp_path / "c.json", comparison)
    with pytest.raises(
        InputError, match=r"c\.json is not a readable audit: `schema` is expected to be 'zloss.audit/1'"
    ):
        read_record(tmp_path / "c.json", AuditReport)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": "zloss.audit/9"}', "reads zloss.audit/1"),
        ('{"schema": "other/1"}', "is not a zloss result"),
        ("[1, 2]", "is not a zloss result"),
        ('{"schema": "zloss.audit/1", "model": 3}', "not a readable audit: `model` is expected to be an object"),
        ('{"schema": "zloss.comparison/1", "baseline": "ce"}', "not a readable comparison: `seeds` is missing"),
        ('{"schema": "zloss.loss-audit/1", "identified": []}', "not a readable loss-audit: `identified`"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, content: str, message: str) -> None:
    """What is not JSON: `tests/results/test_reading.py`."""
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        load_results([tmp_path / "report.json"])
    assert "report.json" in str(caught.value)


@pytest.mark.parametrize(
    "kind", ["audit", "comparison", "drift", "implementation-audit", "recommendation", "reproduction"]
)
def test_keys_of_a_newer_version_survive(kind: str) -> None:
    record = example_results()[f"zloss.{kind}/1"]
    data = record.to_dict() | {"newer": [1, {"a": None}]}
    if kind in ("audit", "comparison"):
        data["provenance"] |= {"gpu": {"name": "none"}}
    assert type(record).from_dict(data).to_dict() == data


def test_a_missing_path_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        load_results([tmp_path / "nothing"])
    with pytest.raises(InputError, match="contains no result"):
        load_results([tmp_path])


def test_recorded_commands_say_nothing_of_the_folders_of_a_machine(tmp_path: Path) -> None:
    model, text, out = tmp_path / "model", tmp_path / "some text.txt", tmp_path / "not" / "there"
    model.mkdir()
    text.write_text("words")
    got = recorded_command(["audit", str(model), "--text", str(text), "--out", str(out), "--coef", "1e-3"])
    assert got == "zloss audit ./model --text 'some text.txt' --out there --coef 1e-3"
    assert (
        recorded_command(["audit", "EleutherAI/pythia-70m", "--blocks", "4"])
        == "zloss audit EleutherAI/pythia-70m --blocks 4"
    )
