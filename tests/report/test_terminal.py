"""Documents on a terminal: all numbers, all stages, nothing cut, nothing wider than the terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.laws.example_results import example_results
from tests.measured_reports import weighed
from tests.report.printing import printed
from zloss.decide.answer import decide_records
from zloss.decide.decision_map import with_decisions
from zloss.decide.stages import STAGES
from zloss.report.audit import audit_summary, side_by_side_document, tally
from zloss.report.centering import centering_summary
from zloss.report.document import Cell, Column, Item, Items, Table, Text
from zloss.report.files import terminal_document
from zloss.report.numbers import number
from zloss.report.terminal import PADDING, column_groups, folded_widths, print_document
from zloss.results.audit import AuditReport
from zloss.results.centering import Centering, CenteringNumbers
from zloss.results.files import RECORDS, kind_of
from zloss.results.provenance import Provenance
from zloss.results.quantities import HEAD


def widest(text: str) -> int:
    return max(cell_len(line.rstrip()) for line in text.splitlines())


def test_every_number_and_stage_is_printed_and_explained(report: AuditReport) -> None:
    text, wide = (printed(audit_summary(report, verbose=True), width) for width in (80, 140))
    for label in HEAD:
        line = next(line for line in text.splitlines() if line.strip().startswith(label.symbol))
        assert number(getattr(report.heads.raw, label.key)) in line
        assert number(getattr(report.heads.centered, label.key)) in line
    assert all(stage.name in text for stage in STAGES)
    assert tally(report.decisions) in " ".join(text.split())
    assert "…" not in text
    # The meaning is next to the number on a wide terminal, below the table on a narrow one.
    meaning = "p99.9 of |log Z − c|, the log-normalizer tail"
    for shown, beside in ((wide, number(report.heads.raw.p_z_999)), (text, "P_Z^99.9: ")):
        (line,) = [line for line in shown.splitlines() if meaning in line]
        assert beside in line


def test_names_with_brackets_are_printed_as_they_are(report: AuditReport) -> None:
    text = printed(audit_summary(replace(report, model=replace(report.model, name="[red]model[/red]"))))
    assert "[red]model[/red]" in text
    table = Table((Column("[bold]", "text"),), (("[red]cell[/red]",),), title="[i]title[/i]")
    text = printed([Text("[link]x"), table, Items((Item("[b]n", "fired", "fired", "[s]t"),))])
    for part in ("[link]x", "[bold]", "[red]cell[/red]", "[i]title[/i]", "[b]n", "[s]t"):
        assert part in text


@pytest.mark.parametrize("count", [2, 6])
def test_side_by_side_cuts_no_number_on_a_narrow_terminal(report: AuditReport, other: AuditReport, count: int) -> None:
    named = [(f"audit {i}", (report, other)[i % 2]) for i in range(count)]
    text = printed(side_by_side_document(named), 60)
    assert "…" not in text
    assert widest(text) <= 60
    for audit in (report, other):
        assert number(audit.heads.raw.p_z_999) in text
        assert number(audit.heads.centered.a_p_99) in text


@pytest.mark.parametrize("schema", RECORDS)
def test_every_kind_of_result_fits(schema: str) -> None:
    document = terminal_document(decide_records([example_results()[schema]]))
    for width in (60, 80, 132):
        text = printed(document, width)
        # What is copied is never broken: lines of code may be longer.
        assert all(cell_len(line.rstrip()) <= width or line.startswith("  ") for line in text.splitlines())
        assert width < 80 or kind_of(schema) == "recommendation" or widest(text) <= width


def test_a_call_for_centering_stays_short_with_a_planned_lambda_above_its_limit(bare: AuditReport) -> None:
    """With both files and the next command, a terminal shows at most 25 lines."""
    audited = with_decisions(weighed(replace(bare, ppl=20.0), noise=(0.24, 0.02), r_z=0.2))
    text = printed(audit_summary(audited))
    assert " The planned λ = 1e-4 is above its limit of 2e-5." in " ".join(text.split())
    assert len(text.strip().splitlines()) <= 21


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("keys", [1, 2])
def test_every_number_is_printed_once_at_any_width(width: int, keys: int) -> None:
    names = [Column("method", "text"), Column("head", "text")][:keys]
    columns = (*names, *(Column(f"column {column}") for column in range(8)))
    rows = tuple(
        (*(f"key {row}", f"head {row}")[:keys], *(f"{row}{column}.12345" for column in range(8))) for row in range(3)
    )
    text = printed([Table(columns, rows, title="a title", keys=keys)], width)
    assert widest(text) <= width
    assert text.count("a title") == 1
    for row in range(3):
        for column in range(8):
            assert text.count(f"{row}{column}.12345") == 1
    parts = sum("column" in line for line in text.splitlines())
    assert text.count("key 1") == parts
    assert (parts == 1) == (width == 200)


def test_names_and_sentences_are_folded_and_several_sentences_are_printed_below_one_another() -> None:
    columns = (Column("router loss", "text"), *(Column(f"column {column}") for column in range(4)))
    text = printed([Table(columns, (("active_route_mean matched 0.001", *["1.2345"] * 4),))], 62)
    (header,) = [line for line in text.splitlines() if "column 0" in line]
    assert "column 3" in header
    long = "a sentence of many words that goes on and on until it is wider than any terminal has ever been " * 2
    text = printed([Table((Column("id", "text"), Column("seen", "prose")), (("first", long),))])
    assert widest(text) <= 80
    assert " ".join(text.split()).count("many words") == 2
    verdict = Cell(long, tone="pass", mark="holds")
    parts = tuple(Column(f"part {i}", "prose") for i in range(4))
    text = printed([Table((Column("id", "text"), *parts), (("first", *[verdict] * 4),))])
    assert widest(text) <= 80
    assert [line.split(":")[0].strip() for line in text.splitlines() if "holds" in line] == [p.title for p in parts]


def test_columns_are_grouped_in_order_and_folded_only_where_they_must_be() -> None:
    widths = [10, 8, 8, 8, 60]
    groups = column_groups(widths, [10], 36)
    assert groups == [(1, 2), (3,), (4,)]
    assert all(10 + PADDING + sum(widths[i] + PADDING for i in group) <= 36 for group in groups[:-1])
    assert column_groups([10], [10], 40) == [()]
    folded = [
        folded_widths([10, wide], [4, least], room) for wide, least, room in ((12, 5, 36), (60, 30, 46), (60, 30, 16))
    ]
    assert folded == [[10, 12], [10, 36], [4, 30]]


def test_sentences_are_broken_between_words_only_and_code_never() -> None:
    path = "a/very/long/path/" + "x" * 60
    code = f"zloss audit {path} --out here"
    shown = printed([Text(f"read from {path} line 7"), Text(code, "code")], 40).splitlines()
    assert {path, f"  {code}"} <= set(shown)


def test_nothing_is_colored_where_it_is_not_asked_for(
    report: AuditReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_document(audit_summary(report))
    piped = capsys.readouterr().out
    assert "\x1b" not in piped
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    print_document(audit_summary(report), Console(file=stream, width=80, force_terminal=True))
    assert "\x1b[3" not in stream.getvalue()


def test_a_centering_says_what_changed_and_where_the_copy_is() -> None:
    before = CenteringNumbers(20.4, 17.5, 30.7, 12.2, 41.0, 0.25, 0.03, 0.01, 0.02, 0.001, 0.002)
    result = Centering(
        model="m", corpus="c", predictions=8, tied_before=True, tied_after=False, extra_bytes=2_500_000, stored_dtype="fp32",
        vocab=8, valid_vocab=8, mean_row_norm=1.0, mean_bias=None, before=before, after=replace(before, mu_abs_99=1e-6),
        ppl_relative_difference=0.0, greedy_tokens=4, greedy_equal=True, verified=True,
        provenance=Provenance(zloss="1", torch="2", command="zloss center", started="now", seconds=1.0), notes=("a note",),
        findings=("a finding",),
    )  # fmt: skip
    text = printed(centering_summary(result, "copy/of the model"))
    assert "a separate tensor in the copy: 2.5 MB more" in text
    # A smaller P_Z^99.9 of the copy read as an improvement.
    assert "raw before and centered after: their difference is not a gain." in " ".join(text.split())
    for part in ("a note", "a finding", "p99 |μ| (nat)", "17.5", "1×10⁻⁶", "copy/of the model"):
        assert part in text, part
