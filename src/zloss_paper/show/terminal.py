"""A reproduction on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zloss.report.tables.reproduction import NOT_COMPARABLE
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN
from zloss_paper.engine.reproduction import Reproduction
from zloss_paper.show.layout import deviations, header, missing, printed_lines, tally

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

MARKS = {HOLDS: ("●", "green"), FAILS: ("●", "red"), OPEN: ("○", "dim")}
PADDING = 3
"""Blanks and rule between two columns."""
STYLES = {"ours": "", "paper": "cyan", "ratio": "dim"}


def print_reproduction(result: Reproduction, console: Console | None = None) -> None:
    """Title, table, what deviates, verdicts, our choices; a table wider than the terminal is printed in parts."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(markup=False)
    console.print(Text(f"{result.recipe.label}: {result.recipe.title} ({result.profile} profile)", style="bold"))
    for table in _tables(result, console.width):
        console.print(table)
    if result.recipe.columns and not result.comparable:
        console.print(Text(NOT_COMPARABLE))
        for deviation in deviations(result):
            console.print(Text(f"  {deviation}", style="dim"))
    for sentence in (*missing(result), *result.notes):
        console.print(Text(sentence, style="dim"))
    if result.claims and result.judged:
        _print_claims(result, console)
    elif result.claims:
        console.print(Text(f"Claims: {tally(result)}."))
    if choices := result.recipe.unstated():
        console.print(Text("Not stated by the paper, so our choice:"))
        for sentence, settings in _grouped(choices).items():
            console.print(Text(f"  {', '.join(settings)}: {sentence}", style="dim"))


def _tables(result: Reproduction, width: int) -> Iterator[RichTable]:
    """The lines, in as many tables as their numbers need at this width; each repeats the key of a line."""
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Column
    from rich.table import Table as RichTable
    from rich.text import Text

    names, body = header(result), printed_lines(result)
    keys = len(names) - len(result.recipe.columns)
    cells = [[names[i], *(line.cells[i] for line in body)] for i in range(len(names))]
    whole = [max(map(cell_len, column)) for column in cells]
    words = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in cells]
    numbers = sum(size + PADDING for size in whole[keys:])
    key_widths = folded_keys(whole[:keys], words[:keys], max(width // 2, width - numbers))
    for group in column_groups(whole, key_widths, width):
        columns = [Column(names[i], width=key_widths[i]) for i in range(keys)]
        columns += [Column(names[i], justify="right", no_wrap=True, min_width=whole[i]) for i in group]
        table = RichTable(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for line in body:
            table.add_row(*(Text(line.cells[i]) for i in (*range(keys), *group)), style=STYLES[line.style])
        yield table


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


def _print_claims(result: Reproduction, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), title=f"Claims: {tally(result)}")
    table.title_justify = "left"
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for judged in result.claims:
        mark, style = MARKS[judged.ours.verdict]
        text = Text(judged.claim.statement)
        text.append(f"\n{judged.ours.evidence}", style="dim")
        table.add_row(Text(mark, style=style), Text(judged.ours.verdict), text)
    console.print(table)


def _grouped(choices: dict[str, str]) -> dict[str, list[str]]:
    """Settings that share one choice, together."""
    found: dict[str, list[str]] = {}
    for setting, sentence in choices.items():
        found.setdefault(sentence, []).append(setting)
    return found
