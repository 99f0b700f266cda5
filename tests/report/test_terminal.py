"""Documents on a terminal: all numbers, all stages, nothing cut, nothing wider than the terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.laws.example_results import example_results
from tests.report.printing import printed
from zloss.decide.answer import decide_records
from zloss.decide.stages import STAGES
from zloss.report.audit import audit_summary, side_by_side_document, tally
from zloss.report.centering import centering_summary
from zloss.report.document import Cell, Column, Item, Items, Table, Text
from zloss.report.files import terminal_document
from zloss.report.numbers import number
from zloss.report.terminal import PADDING, column_groups, folded_keys, print_document
from zloss.results.audit import AuditReport
from zloss.results.centering import Centering, CenteringNumbers
from zloss.results.files import KINDS
from zloss.results.provenance import Provenance
from zloss.results.quantities import HEAD


def widest(text: str) -> int:
    return max(cell_len(line.rstrip()) for line in text.splitlines())


def test_every_number_and_stage_is_printed(report: AuditReport) -> None:
    text = printed(audit_summary(report, verbose=True))
    for label in HEAD:
        line = next(line for line in text.splitlines() if line.strip().startswith(label.symbol))
        assert number(getattr(report.heads.raw, label.key)) in line
        assert number(getattr(report.heads.centered, label.key)) in line
    assert all(stage.name in text for stage in STAGES)
    assert tally(report.decisions) in text
    assert "…" not in text


def test_a_wide_terminal_has_the_meanings_next_to_the_numbers(report: AuditReport) -> None:
    narrow, wide = (printed(audit_summary(report, verbose=True), width) for width in (80, 140))
    meaning = "p99.9 of |log Z − c|, the log-normalizer tail"
    (line,) = [line for line in wide.splitlines() if meaning in line]
    assert number(report.heads.raw.p_z_999) in line
    (line,) = [line for line in narrow.splitlines() if meaning in line]
    assert line.startswith("P_Z^99.9: ")


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


@pytest.mark.parametrize("kind", sorted(set(KINDS.values())))
@pytest.mark.parametrize("width", [60, 80, 132])
def test_every_kind_of_result_fits(kind: str, width: int) -> None:
    record = next(one for one in example_results().values() if one.SCHEMA.startswith(f"zloss.{kind}/"))
    text = printed(terminal_document(decide_records([record])), width)
    # What is copied is never broken: lines of code may be longer.
    assert all(cell_len(line.rstrip()) <= width or line.startswith("  ") for line in text.splitlines())
    if width >= 80 and kind != "recommendation":
        assert widest(text) <= width


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


def test_a_table_whose_names_can_be_folded_stays_whole() -> None:
    columns = (Column("router loss", "text"), *(Column(f"column {column}") for column in range(4)))
    text = printed([Table(columns, (("active_route_mean matched 0.001", *["1.2345"] * 4),))], 62)
    (header,) = [line for line in text.splitlines() if "column 0" in line]
    assert "column 3" in header


def test_sentences_in_a_table_are_folded_and_several_are_printed_below_one_another() -> None:
    long = "a sentence of many words that goes on and on until it is wider than any terminal has ever been " * 2
    one = Table((Column("id", "text"), Column("seen", "prose")), (("first", long),))
    text = printed([one])
    assert widest(text) <= 80
    assert " ".join(text.split()).count("many words") == 2
    verdict = Cell(long, tone="pass", mark="holds")
    many = Table(
        (Column("id", "text"), *(Column(f"part {i}", "prose") for i in range(4))), (("first", *[verdict] * 4),)
    )
    text = printed([many])
    assert widest(text) <= 80
    assert [line.split(":")[0].strip() for line in text.splitlines() if "holds" in line] == [
        f"part {i}" for i in range(4)
    ]


def test_numbers_are_grouped_in_order_and_whole() -> None:
    widths = [10, 8, 8, 8, 60]
    groups = column_groups(widths, [10], 36)
    assert groups == [(1, 2), (3,), (4,)]
    for group in groups[:-1]:
        assert 10 + PADDING + sum(widths[i] + PADDING for i in group) <= 36
    assert column_groups([10], [10], 40) == [()]


def test_keys_are_folded_between_words_only_where_they_must_be() -> None:
    assert folded_keys([10, 12], [4, 5], 40) == [10, 12]
    assert folded_keys([10, 60], [4, 30], 50) == [10, 36]
    assert folded_keys([10, 60], [4, 30], 20) == [4, 30]


def test_sentences_are_broken_between_words_only_and_code_never() -> None:
    path = "a/very/long/path/" + "x" * 60
    assert path in printed([Text(f"read from {path} line 7")], 40).splitlines()
    assert (
        f"  zloss audit {path} --out here" in printed([Text(f"zloss audit {path} --out here", "code")], 40).splitlines()
    )


def test_nothing_is_coloured_where_it_is_not_asked_for(
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
    for part in ("a note", "a finding", "p99 |μ| (nat)", "17.5", "1×10⁻⁶", "copy/of the model"):
        assert part in text, part
