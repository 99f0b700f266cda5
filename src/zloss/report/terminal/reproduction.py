"""A reproduction that was read from its file, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zloss.report.tables.reproduction import (
    NOT_COMPARABLE,
    ReproductionTable,
    claims_tally,
    deviations,
    missing_numbers,
    reproduction_table,
)
from zloss.results.reproduction import ReproductionRecord

if TYPE_CHECKING:
    from rich.console import Console

MARKS = {"holds": ("●", "green"), "does not hold": ("✗", "bold red"), "cannot be tested here": ("○", "dim")}
STYLES = {"ours": "", "paper": "cyan", "ratio": "dim"}
NAME_WIDTH = 24
"""Columns of a name that is wrapped because the numbers beside it would not fit."""
GAP = 2
"""Blanks between two columns."""


def print_reproduction_record(record: ReproductionRecord, console: Console | None = None) -> None:
    """The verdicts in one line, the table, what deviates, and every claim with its evidence."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(markup=False)
    console.print(Text(f"{record.label}: {record.title} ({record.profile} profile)", style="bold"))
    if record.claims:
        console.print(Text(f"Claims of the paper on our numbers: {claims_tally(record)}."))
    _print_table(reproduction_table(record), console)
    if record.columns and not record.comparable:
        console.print(Text(NOT_COMPARABLE))
        for sentence in deviations(record):
            console.print(Text(f"  {sentence}", style="dim"))
    for sentence in (*missing_numbers(record), *record.notes):
        console.print(Text(sentence, style="dim"))
    _print_claims(record, console)


def _print_table(table: ReproductionTable, console: Console) -> None:
    """Where it is wider than the terminal, its names are wrapped and its numbers spread over several tables."""
    from rich.cells import cell_len
    from rich.table import Column, Table
    from rich.text import Text

    grid = [table.header, *(line.cells for line in table.lines)]
    widths = [max(cell_len(cells[i]) for cells in grid) for i in range(len(table.header))]
    numbers = widths[table.keys :]
    if numbers and sum(width + GAP for width in widths[: table.keys]) + max(numbers) > console.width:
        widths = [min(width, NAME_WIDTH) for width in widths[: table.keys]] + numbers
    for chosen in _fitting(widths, table.keys, console.width):
        columns = [
            Column(
                table.header[i],
                justify="right" if i >= table.keys else "left",
                no_wrap=i >= table.keys,
                max_width=widths[i] if numbers else None,
                overflow="fold",
            )
            for i in chosen
        ]
        shown = Table(*columns, box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for line in table.lines:
            shown.add_row(*(Text(line.cells[i]) for i in chosen), style=STYLES[line.of])
        console.print(shown)


def _fitting(widths: Sequence[int], keys: int, room: int) -> Iterator[list[int]]:
    """Columns of each printed table: the keys, and as many numbers as fit `room`, at least one."""
    base = sum(width + GAP for width in widths[:keys])
    chosen, used = list(range(keys)), base
    for i in range(keys, len(widths)):
        if len(chosen) > keys and used + widths[i] > room:
            yield chosen
            chosen, used = list(range(keys)), base
        chosen.append(i)
        used += widths[i] + GAP
    yield chosen


def _print_claims(record: ReproductionRecord, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(width=13)
    table.add_column()
    for claim in record.claims:
        mark, style = MARKS[claim.verdict]
        text = Text(claim.statement)
        text.append(f"\n{claim.evidence}", style="dim")
        table.add_row(Text(mark, style=style), Text(claim.verdict), text)
    console.print(table)
