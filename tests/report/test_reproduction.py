"""Committed reproductions, read back from their files: on the terminal and on a page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report.printing import printed
from zloss.cli.main import main
from zloss.decide.answer import decide_results
from zloss.report.document import Cell, to_markdown
from zloss.report.files import render_page
from zloss.report.reproduction import deviations, reproduction_document, reproduction_summary, reproduction_table
from zloss.results.files import load_results, read_record
from zloss.results.reproduction import ReproductionRecord

COMMITTED = Path(__file__).parents[2] / "docs/results"
FILES = sorted(
    path
    for path in COMMITTED.glob("*.json")
    if json.loads(path.read_text(encoding="utf-8"))["schema"] == ReproductionRecord.SCHEMA
)


RECORD = read_record(COMMITTED / "tab_pretrained.json", ReproductionRecord)


def lines(record: ReproductionRecord) -> list[list[str]]:
    """The texts of the table."""
    return [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in reproduction_table(record).rows]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_reproduction_is_reported(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["report", str(file), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    record = read_record(file, ReproductionRecord)
    assert f"Reproduction of {record.label}" in page
    assert out.startswith(f"{record.label}: ")
    assert out.count("…") == sum(claim.evidence.count("…") for claim in record.claims)
    judged = re.findall(r'<td class="t tone-\w+" data-value="(holds|does not hold|cannot be tested here)"', page)
    assert judged == [claim.verdict for claim in record.claims if record.judged]
    held = sum(claim.verdict == "holds" for claim in record.claims)
    if record.claims:
        assert f"Claims of the paper on our numbers: {held} hold" in out
        assert f"{held} hold, " in page
    # Every number is there, and nothing is wider than the terminal.
    table, text = reproduction_table(record), printed(reproduction_summary(record))
    assert {len(row) for row in table.rows} <= {len(table.columns)}
    assert len(table.rows) == sum(1 + 2 * (row.beside is not None) for row in record.rows)
    assert all(number in text for line in lines(record) for number in line[table.keys :])
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    # No stage reads a reproduction, so there is no map to write.
    assert not (tmp_path / "decisions.json").exists()
    assert "Decision map" not in page


def test_a_deviation_names_its_models_where_it_does_not_concern_all() -> None:
    first, second = RECORD.rows[0], replace(RECORD.rows[1], extra={**RECORD.rows[1].extra, "model": "other"})
    first, second = replace(first, deviations=("both.", "one.")), replace(second, deviations=("both.",))
    assert deviations(replace(RECORD, rows=(first, second))) == ["both.", "smollm2: one."]


def test_the_smoke_profile_judges_no_claim_and_a_claim_that_does_not_hold_is_seen() -> None:
    smoke, said = replace(RECORD, profile="smoke"), f"{len(RECORD.claims)} claims, not checked at smoke size"
    text, page = printed(reproduction_summary(smoke)), render_page(decide_results(reproductions=(smoke,)))
    assert said in text
    assert said in page
    assert RECORD.claims[0].statement[:40] not in text
    assert "cannot be tested here" not in page.partition("<footer>")[0]
    changed = replace(RECORD, claims=(replace(RECORD.claims[0], verdict="does not hold"), *RECORD.claims[1:]))
    assert "on our numbers: does not hold" in printed(reproduction_summary(changed))
    page = render_page(decide_results(reproductions=(changed,)))
    assert re.search(r'tone-fired" data-value="does not hold"[^>]*>does not hold', page)
    assert "| **does not hold** |" in to_markdown(reproduction_document(changed))


def test_the_whole_folder_is_one_page() -> None:
    records = [one.record for one in load_results([COMMITTED]) if isinstance(one.record, ReproductionRecord)]
    assert len(records) == len(FILES)
    page = render_page(decide_results(reproductions=records))
    assert "Reproductions of the paper" in page
    assert all(f"({record.label})</h1>" in page for record in records)


@pytest.mark.parametrize("details", [{"audits": 1.5}, {"audits": [{"seconds": 3}]}, {"training_seconds": {"runs": 2}}])
def test_details_of_another_form_leave_the_time_of_the_recipe(details: dict[str, Any]) -> None:
    """A damaged file ended `zloss report` with a traceback."""
    record = replace(RECORD, details=details)
    text = to_markdown(reproduction_document(record))
    assert text.rstrip().endswith(f"This recipe took {record.provenance.seconds:g} s.")


def test_our_line_stands_above_the_paper_s_and_the_ratio() -> None:
    found = lines(RECORD)
    assert [line[2].split(",")[0] for line in found] == ["ours", "paper", "ours/paper"] * 2
    assert [column.title for column in reproduction_table(RECORD).columns[:4]] == ["model", "head", "", "PPL"]
    assert found[0][:4] == ["smollm2", "raw", "ours", "29.73"]
    assert found[1][2:4] == ["paper, GPT-2", "42.58"]
    assert found[2][2:4] == ["ours/paper", "×0.698"]


@pytest.mark.parametrize(
    ("value", "as_printed", "shown"),
    [(28.0, "28.00", "28.00"), (28.0, None, "28"), (None, "28.00", "–"), ("much", "28.00", "much")],
)
def test_numbers_of_the_paper_are_shown_as_it_prints_them(value: Any, as_printed: str | None, shown: str) -> None:
    row = RECORD.rows[0]
    row = replace(
        row, beside={**(row.beside or {}), "ppl": value}, printed={} if as_printed is None else {"ppl": as_printed}
    )
    assert lines(replace(RECORD, rows=(row,)))[1][3] == shown


def test_a_wider_terminal_shows_the_table_in_one_piece() -> None:
    record = read_record(COMMITTED / "tab_fineweb_update_outlier.json", ReproductionRecord)
    for width, pieces in ((80, 2), (200, 1)):
        shown = printed(reproduction_summary(record), width).splitlines()
        assert sum(line.startswith(" method") for line in shown) == pieces
