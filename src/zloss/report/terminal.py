"""A document on a terminal: nothing is wider than it, and no number is cut.

A table that is too wide has its sentences broken between words, is printed in parts that repeat its first columns, or has each
line printed below the other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text as RichText

from zloss.report.document import Block, Cell, Column, Group, Heading, Item, Items, Table, Terms, Text

STYLES = {
    "strong": "bold", "soft": "dim", "raw": "", "centered": "", "code": "", "paper": "cyan",
    "error": "bold red", "warning": "yellow", "note": "cyan", "pass": "green", "fired": "yellow", "harmless": "",
    "quiet": "green", "open": "dim",
}  # fmt: skip
TEXTS = {"strong": "bold", "answer": "bold", "soft": "dim", "lead": "", "facts": "dim", "kicker": "dim", "item": ""}
MARKS = {"fired": "●", "harmless": "●", "quiet": "●"}
"""Before the word of a verdict; ○ where nothing was evaluated."""
SHORT = {"not evaluated": "open", "not applicable": "n/a"}
"""Words of verdicts that are too long for their column."""
WIDE = 120
"""Terminal width, in columns, from which no table column is left out."""
PADDING = 2
"""Blanks and rule between two columns."""
LEAST_PROSE = 26
"""Columns that a sentence in a table needs to be readable."""


def print_document(document: Iterable[Block], console: Console | None = None) -> None:
    """Print every block; figures and cards are for pages alone."""
    console = console or Console(markup=False)
    for block in document:
        match block:
            case Heading(text):
                _sentence(console, text, style="bold")
            case Text(sentence, "code"):
                for line in sentence.splitlines():
                    # Never broken over two lines: it is copied as it is.
                    console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)
            case Text(sentence, style, tone):
                indent = "  " if style == "item" else ""
                look = f"{TEXTS.get(style, '')} {STYLES.get(tone, '')}".strip()
                _sentence(console, sentence, first=indent, rest=indent, style=look)
            case Terms(items):
                for name, text in items:
                    _sentence(console, text, first=f"{name}: ", rest="    ")
            case Table():
                _print_table(block, console)
            case Items(items):
                _print_items(items, console)
            case Group(_, blocks):
                print_document(blocks, console)


def _sentence(console: Console, text: str, *, first: str = "", rest: str = "", style: str = "") -> None:
    """Text behind `first`, broken between words only, so that a path or a command stays whole."""
    wrapped = textwrap.wrap(
        text,
        console.width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = wrapped or [first.rstrip()]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True, style=style or None)


def _print_items(items: Sequence[Item], console: Console) -> None:
    """Verdict, name and sentence of each in columns, with what follows below the sentence."""
    grid = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for item in items:
        text = RichText(item.text)
        for line, tone in item.more:
            text.append(f"\n{line}", style=STYLES.get(tone, ""))
        word = SHORT.get(item.word, item.word)
        grid.add_row(
            RichText(f"{MARKS.get(item.tone, '○')} {word}", style=STYLES[item.tone]), RichText(item.name), text
        )
    console.print(grid)


def _print_table(table: Table, console: Console) -> None:
    if table.title:
        _sentence(console, table.title, style="bold")
    if table.rows:
        kept = [i for i, column in enumerate(table.columns) if console.width >= WIDE or not column.wide]
        columns = [table.columns[i] for i in kept]
        rows = [[Cell(cell) if isinstance(cell := row[i], str) else cell for i in kept] for row in table.rows]
        _print_rows(columns, rows, min(table.keys, len(kept)), console)
    explained = any(column.wide for column in table.columns) and console.width >= WIDE
    for quantity in () if explained else table.legend:
        unit = f", in {quantity.unit}" if quantity.unit in ("nat", "nat²", "s") else ""
        _sentence(console, f"{quantity.meaning}{unit}", first=f"{quantity.symbol}: ", rest="    ")
    if table.note:
        _sentence(console, table.note, style="dim")


def _print_rows(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], keys: int, console: Console) -> None:
    texts = [(column.title, *(_plain(row[i]) for row in rows)) for i, column in enumerate(columns)]
    widths = [max(map(cell_len, (*title.split("\n"), *cells))) for title, *cells in texts]
    words = [max((cell_len(word) for text in column for word in text.split()), default=1) for column in texts]
    prose = [i for i, column in enumerate(columns) if column.kind == "prose"]
    # Sentences are folded; in a table of numbers its keys.
    folded = prose or list(range(keys))
    wanted = [widths[i] for i in folded]
    least = [max(min(LEAST_PROSE, widths[i]), words[i]) if prose else words[i] for i in folded]
    room = console.width - PADDING * len(columns) - sum(widths) + sum(wanted)
    if sum(least) <= room:
        fitted = zip(folded, folded_widths(wanted, least, room), strict=True)
        _print_part(columns, rows, dict(enumerate(widths)) | dict(fitted), console)
    elif prose:
        _print_stacked(columns, rows, console)
    else:
        fitted_keys = folded_widths(wanted, least, console.width // 2 - PADDING * keys)
        for group in column_groups(widths, fitted_keys, console.width):
            _print_part(columns, rows, dict(enumerate(fitted_keys)) | {i: widths[i] for i in group}, console)


def folded_widths(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """`room` divided among columns that can be folded: each has at least its `least`, and the narrowest grow first."""
    widths = list(least)
    for _ in range(room - sum(least)):
        growing = [i for i, width in enumerate(widths) if width < wanted[i]]
        if growing:
            widths[min(growing, key=widths.__getitem__)] += 1
    return widths


def column_groups(whole: Sequence[int], key_widths: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """The number columns of each part of a table, in order: those that fit next to the key whole, and at least one."""
    room = width - sum(key_widths) - PADDING * len(key_widths)
    groups: list[list[int]] = [[]]
    for column in range(len(key_widths), len(whole)):
        if groups[-1] and sum(whole[i] + PADDING for i in (*groups[-1], column)) > room:
            groups.append([])
        groups[-1].append(column)
    return [tuple(group) for group in groups]


def _print_part(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], widths: dict[int, int], console: Console
) -> None:
    """The chosen columns, each in its width."""
    titled = any(columns[i].title for i in widths)
    shown = [
        RichColumn(
            RichText(columns[i].title),
            justify="right" if columns[i].kind == "number" else "left",
            width=width,
            overflow="fold",
        )
        for i, width in widths.items()
    ]
    box = SIMPLE_HEAD if titled else None
    padding = (0, 1 if titled else PADDING, 0, 0)
    part = RichTable(*shown, box=box, pad_edge=False, padding=padding, show_header=titled)
    for row in rows:
        part.add_row(*(_rich(row[i]) for i in widths))
    console.print(part)


def _print_stacked(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], console: Console) -> None:
    """Each line as a paragraph: its first cell, then title and text of the others."""
    for row in rows:
        if row[0].text:
            _sentence(console, _plain(row[0]), style="bold")
        for column, cell in list(zip(columns, row, strict=True))[1:]:
            if text := _plain(cell):
                title = column.title.replace("\n", " ")
                _sentence(
                    console, text, first=f"  {title}: " if title else "  ", rest="    ", style=STYLES.get(cell.tone, "")
                )


def _plain(cell: Cell) -> str:
    if cell.token:
        return f"{cell.note}{cell.text}"
    text = f"{cell.mark} {cell.text}".strip()
    return f"{text} ({cell.note})" if cell.note else text


def _rich(cell: Cell) -> RichText:
    # `Text`, not markup: a name may hold square brackets.
    text = RichText(_plain(cell), style="" if cell.mark else STYLES.get(cell.tone, ""))
    if cell.mark:
        text.stylize(STYLES.get(cell.tone, ""), 0, len(cell.mark))
    return text
