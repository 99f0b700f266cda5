"""Results on disk: told apart by schema, refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zloss.errors import InputError
from zloss.results.audit import AuditReport
from zloss.results.files import load_results
from zloss.results.writing import write_json


def test_kinds_are_told_apart_and_foreign_json_is_passed_over(
    report: AuditReport, loss_audit: dict[str, Any], comparison: dict[str, Any], tmp_path: Path
) -> None:
    write_json(tmp_path / "report.json", report.to_dict())
    write_json(tmp_path / "loss.json", loss_audit)
    write_json(tmp_path / "comparison.json", comparison)
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "decisions.json").write_text('{"schema": "zloss.decisions/1"}')
    kinds = {result.path.name: result.kind for result in load_results([tmp_path])}
    assert kinds == {"report.json": "audit", "loss.json": "loss-audit", "comparison.json": "comparison"}
    (audit,) = load_results([tmp_path / "report.json"])
    assert audit.audit().heads == report.heads


def test_a_comparison_without_a_schema_is_known_by_its_quality_section(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"quality": {}}')
    assert load_results([tmp_path / "c.json"])[0].kind == "comparison"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": "zloss.audit/9"}', "reads zloss.audit/1"),
        ('{"schema": "other/1"}', "is not a result of zloss"),
        ("[1, 2]", "is not a result of zloss"),
        ('{"schema": "zloss.aud', "is not JSON"),
        ('{"schema": "zloss.audit/1", "model": 3}', "not a readable audit"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        [result.audit() for result in load_results([tmp_path / "report.json"])]
    assert "report.json" in str(caught.value)


def test_a_missing_path_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        load_results([tmp_path / "nothing"])
    with pytest.raises(InputError, match="holds no result"):
        load_results([tmp_path])


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="is not JSON"):
        load_results([tmp_path / "report.json"])
