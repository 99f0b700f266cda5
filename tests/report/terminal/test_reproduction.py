"""Committed reproductions, read back from their files: on the terminal and on a page."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from zloss.cli.main import main
from zloss.decide.decided_results import decide_results
from zloss.report.html.page import render_page
from zloss.report.tables.reproduction import deviations, reproduction_table
from zloss.report.terminal.reproduction import PADDING, column_groups, folded_keys, print_reproduction
from zloss.results.files import load_results, records_of
from zloss.results.reproduction import ReproductionRecord, read_reproduction_record

COMMITTED = Path(__file__).parents[3] / "docs/results"
FILES = sorted(
    path
    for path in COMMITTED.glob("*.json")
    if json.loads(path.read_text(encoding="utf-8"))["schema"] == ReproductionRecord.SCHEMA
)


def printed(record: ReproductionRecord, width: int = 80) -> str:
    stream = io.StringIO()
    print_reproduction(record, Console(file=stream, width=width))
    return stream.getvalue()


def test_there_are_committed_reproductions() -> None:
    assert len(FILES) > 30


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_reproduction_is_reported(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["report", str(file), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    record = read_reproduction_record(file)
    assert f"Reproduction of {record.label}" in page
    assert out.startswith(f"{record.label}: ")
    assert out.count("…") == sum(claim.evidence.count("…") for claim in record.claims)
    assert page.count('<td class="verdict-') == len(record.claims)
    held = sum(claim.verdict == "holds" for claim in record.claims)
    if record.claims:
        assert f"Claims of the paper on our numbers: {held} hold" in out
        assert f"Claims of the paper on our numbers: {held} hold" in page
    # No stage reads a reproduction, so there is no map to write.
    assert not (tmp_path / "decisions.json").exists()
    assert "Decision map" not in page


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_numbers_fit_eighty_columns_and_are_all_there(file: Path) -> None:
    record = read_reproduction_record(file)
    table = reproduction_table(record)
    text = printed(record)
    assert all(len(line.cells) == len(table.header) for line in table.lines)
    assert len(table.lines) == sum(1 + 2 * (row.beside is not None) for row in record.rows)
    numbers = [cell for line in table.lines for cell in line.cells[table.keys :]]
    assert all(number in text for number in numbers)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_a_wider_terminal_shows_the_table_in_one_piece() -> None:
    record = read_reproduction_record(COMMITTED / "tab_fineweb_update_outlier.json")
    parts = {
        width: sum(line.startswith(" method") for line in printed(record, width).splitlines()) for width in (80, 200)
    }
    assert parts == {80: 2, 200: 1}


def test_numbers_are_grouped_in_order_and_whole() -> None:
    groups = column_groups([10, 8, 8, 8, 60], [10], 40)
    assert groups == [(1, 2), (3,), (4,)]
    for group in groups[:-1]:
        assert 10 + PADDING + sum([10, 8, 8, 8, 60][i] + PADDING for i in group) <= 40
    assert column_groups([10], [10], 40) == [()]


def test_keys_are_folded_between_words_only_where_they_must_be() -> None:
    assert folded_keys([10, 12], [4, 5], 40) == [10, 12]
    assert folded_keys([10, 60], [4, 30], 50) == [10, 34]
    assert folded_keys([10, 60], [4, 30], 20) == [4, 30]


def test_numbers_of_the_paper_are_shown_as_it_prints_them() -> None:
    record = read_reproduction_record(COMMITTED / "tab_pretrained.json")
    row = replace(record.rows[0], beside={**record.rows[0].beside, "ppl": 28.0}, printed={"ppl": "28.00"})
    assert reproduction_table(replace(record, rows=(row,))).lines[1].cells[3] == "28.00"
    assert reproduction_table(replace(record, rows=(replace(row, printed={}),))).lines[1].cells[3] == "28"


def test_a_deviation_names_its_models_where_it_does_not_concern_all() -> None:
    record = read_reproduction_record(COMMITTED / "tab_pretrained.json")
    first, second = record.rows[0], replace(record.rows[1], extra={**record.rows[1].extra, "model": "other"})
    first, second = replace(first, deviations=("both.", "one.")), replace(second, deviations=("both.",))
    assert deviations(replace(record, rows=(first, second))) == ["both.", "smollm2: one."]


def test_the_smoke_profile_judges_no_claim() -> None:
    record = replace(read_reproduction_record(COMMITTED / "tab_pretrained.json"), profile="smoke")
    text = printed(record)
    assert f"{len(record.claims)} claims, not judged at smoke size" in text
    assert record.claims[0].statement[:40] not in text
    page = render_page(decide_results(reproductions=(record,)))
    assert f"{len(record.claims)} claims, not judged at smoke size" in page
    assert "cannot be tested here" not in page


def test_a_printed_number_without_its_value_is_left_out() -> None:
    record = read_reproduction_record(COMMITTED / "tab_pretrained.json")
    beside = {name: value for name, value in (record.rows[0].beside or {}).items() if name != "ppl"}
    for row in (replace(record.rows[0], beside=beside), replace(record.rows[0], beside=beside | {"ppl": "much"})):
        cells = reproduction_table(replace(record, rows=(row,))).lines[1].cells
        assert cells[3] == ("much" if "ppl" in (row.beside or {}) else "–")


def test_our_line_stands_above_the_paper_s_and_the_ratio() -> None:
    table = reproduction_table(read_reproduction_record(COMMITTED / "tab_pretrained.json"))
    assert [line.of for line in table.lines] == ["ours", "paper", "ratio"] * 2
    assert table.header[:4] == ("model", "head", "", "PPL")
    ours, paper, ratio = (line.cells for line in table.lines[:3])
    assert ours[:4] == ("smollm2", "raw", "ours", "29.73")
    assert paper[2:4] == ("paper, GPT-2", "42.58")
    assert ratio[2:4] == ("ours / paper", "×0.698")


def test_a_claim_that_does_not_hold_is_seen() -> None:
    record = read_reproduction_record(COMMITTED / "tab_pretrained.json")
    failed = replace(record.claims[0], verdict="does not hold")
    changed = replace(record, claims=(failed, *record.claims[1:]))
    assert "✗  does not hold" in printed(changed)
    assert 'class="verdict-finding">does not hold' in render_page(decide_results(reproductions=(changed,)))


def test_the_whole_folder_is_one_page() -> None:
    loaded = load_results([COMMITTED])
    records = records_of(loaded, ReproductionRecord)
    assert len(records) == len(FILES)
    page = render_page(decide_results(reproductions=records))
    assert "Reproductions of the paper" in page
    assert all(f"<code>{record.label}</code>" in page for record in records)
