"""The terminal view: all numbers, all stages, nothing cut."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from zloss.decide.stages import STAGES
from zloss.report.tables.verdicts import tally
from zloss.report.terminal.audit import print_audit, print_side_by_side
from zloss.report.text.numbers import number
from zloss.report.text.summary import summarize
from zloss.results.audit import AuditReport
from zloss.results.quantities import HEAD


def printed(width: int = 80) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=width), stream


def test_every_number_and_stage_is_printed(report: AuditReport) -> None:
    console, stream = printed()
    print_audit(report, console)
    text = stream.getvalue()
    for label in HEAD:
        line = next(line for line in text.splitlines() if line.strip().startswith(label.symbol))
        assert number(getattr(report.heads.raw, label.key)) in line
        assert number(getattr(report.heads.centered, label.key)) in line
    assert all(stage.name in text for stage in STAGES)
    assert tally(report.decisions) in text
    assert "…" not in text


def test_a_wide_terminal_has_the_meanings_beside_the_numbers(report: AuditReport) -> None:
    narrow, wide = (printed(width) for width in (80, 140))
    for console, _ in (narrow, wide):
        print_audit(report, console)
    meaning = "p99.9 of |log Z − c|, the log-normalizer tail"
    (line,) = [line for line in wide[1].getvalue().splitlines() if meaning in line]
    assert number(report.heads.raw.p_z_999) in line
    (line,) = [line for line in narrow[1].getvalue().splitlines() if meaning in line]
    assert line.startswith("P_Z^99.9: ")


def test_names_with_brackets_are_printed_as_they_are(report: AuditReport) -> None:
    console, stream = printed()
    print_audit(replace(report, model=replace(report.model, name="[red]model[/red]")), console)
    assert "[red]model[/red]" in stream.getvalue()


@pytest.mark.parametrize("count", [2, 6])
def test_side_by_side_cuts_no_number_on_a_narrow_terminal(report: AuditReport, other: AuditReport, count: int) -> None:
    console, stream = printed(60)
    print_side_by_side([(f"audit {i}", (report, other)[i % 2]) for i in range(count)], console)
    text = stream.getvalue()
    assert "…" not in text
    assert console.width == 60
    for audit in (report, other):
        assert number(audit.heads.raw.p_z_999) in text
        assert number(audit.heads.centered.a_p_99) in text


def test_the_summary_follows_the_numbers(report: AuditReport) -> None:
    text = " ".join(summarize(report))
    raw, centered = report.heads.raw, report.heads.centered
    assert raw.p_z_999 is not None
    assert centered.p_z_999 is not None
    assert centered.p_z_999 < raw.p_z_999
    assert f"lowers P_Z^99.9 from {number(raw.p_z_999)} to {number(centered.p_z_999)}" in text
    swapped = replace(report, heads=replace(report.heads, raw=centered, centered=raw))
    assert f"raises P_Z^99.9 from {number(centered.p_z_999)} to {number(raw.p_z_999)}" in " ".join(summarize(swapped))
    assert "interrupted: it covers 3 of 12" in summarize(replace(report, status="partial", finished_blocks=3))[0]
