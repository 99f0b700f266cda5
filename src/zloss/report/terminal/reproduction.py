"""A reproduction on a terminal."""

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
from zloss.results.reproduction import Choice, ReproductionRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

MARKS = {"holds": ("●", "green"), "does not hold": ("✗", "bold red"), "cannot be tested here": ("○", "dim")}
STYLES = {"ours": "", "paper": "cyan", "ratio": "dim"}
PADDING = 3
"""Blanks and rule between two columns."""
VERDICT_WIDTH = 13
"""Columns of a verdict; the longest takes two lines."""


def print_reproduction(record: ReproductionRecord, console: Console | None = None) -> None:
    """The verdicts in one line, the table, what deviates, every claim with its evidence, and our choices.

    A table wider than the terminal is printed in parts.
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console(markup=False)
    console.print(Text(f"{record.label}: {record.title} ({record.profile} profile)", style="bold"))
    if record.claims:
        console.print(Text(f"Claims of the paper on our numbers: {claims_tally(record)}."))
    for table in _tables(reproduction_table(record), console.width):
        console.print(table)
    if record.columns and not record.comparable:
        console.print(Text(NOT_COMPARABLE))
        for sentence in deviations(record):
            console.print(Text(f"  {sentence}", style="dim"))
    for sentence in (*missing_numbers(record), *record.notes):
        console.print(Text(sentence, style="dim"))
    if record.judged:
        _print_claims(record, console)
    if record.not_stated_by_the_paper:
        console.print(Text("Not stated by the paper, so our choice:"))
        for ours, settings in _grouped(record.not_stated_by_the_paper).items():
            console.print(Text(f"  {', '.join(settings)}: {ours}", style="dim"))


def _tables(table: ReproductionTable, width: int) -> Iterator[RichTable]:
    """The lines, in as many tables as their numbers need at this width; each repeats the key of a line."""
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Column
    from rich.table import Table as RichTable
    from rich.text import Text

    keys = table.keys
    cells = [[name, *(line.cells[i] for line in table.lines)] for i, name in enumerate(table.header)]
    whole = [max(map(cell_len, column)) for column in cells]
    words = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in cells]
    numbers = sum(size + PADDING for size in whole[keys:])
    key_widths = folded_keys(whole[:keys], words[:keys], max(width // 2, width - numbers))
    for group in column_groups(whole, key_widths, width):
        columns = [Column(table.header[i], width=key_widths[i]) for i in range(keys)]
        columns += [Column(table.header[i], justify="right", no_wrap=True, min_width=whole[i]) for i in group]
        shown = RichTable(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for line in table.lines:
            shown.add_row(*(Text(line.cells[i]) for i in (*range(keys), *group)), style=STYLES[line.of])
        yield shown


def folded_keys(whole: Sequence[int], words: Sequence[int], room: int) -> list[int]:
    """Widths of the key columns: whole where they fit in `room`, otherwise the wider ones are folded between words."""
    found = list(words)
    for i in sorted(range(len(whole)), key=lambda i: whole[i]):
        spare = room - sum(found) - PADDING * len(found)
        found[i] += max(0, min(spare, whole[i] - found[i]))
    return found


def column_groups(whole: Sequence[int], key_widths: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """The number columns of each part of a table, in order: those that fit beside the key whole, and at least one."""
    room = width - sum(key_widths) - PADDING * len(key_widths)
    groups: list[list[int]] = [[]]
    for column in range(len(key_widths), len(whole)):
        if groups[-1] and sum(whole[i] + PADDING for i in (*groups[-1], column)) > room:
            groups.append([])
        groups[-1].append(column)
    return [tuple(group) for group in groups]


def _print_claims(record: ReproductionRecord, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(width=VERDICT_WIDTH)
    table.add_column(overflow="fold")
    for claim in record.claims:
        mark, style = MARKS[claim.verdict]
        text = Text(claim.statement)
        text.append(f"\n{claim.evidence}", style="dim")
        table.add_row(Text(mark, style=style), Text(claim.verdict), text)
    console.print(table)


def _grouped(choices: Sequence[Choice]) -> dict[str, list[str]]:
    """Settings that share one choice, together."""
    found: dict[str, list[str]] = {}
    for choice in choices:
        found.setdefault(choice.ours, []).append(choice.setting)
    return found
