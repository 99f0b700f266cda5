"""What is printed fits the terminal: wide tables in parts, sentences broken between words, a legend under a table."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zloss.results.quantities import Definition, define

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNITS = ("nat", "nat²", "s", "share")
"""Units that a legend states; a count says in its meaning what is counted."""


def print_table(console: Console, table: Table, *, keys: int = 1, together: int = 1) -> None:
    """Print a table without cutting a number: one wider than the terminal in parts, each with the first `keys` columns.

    `together`: as many columns are never parted. A part that is too wide alone has its key columns folded.
    """
    from rich.text import Text

    if table.title is not None:
        console.print(Text(str(table.title), style="bold"))
    for part in _parts(console, table, keys, together):
        console.print(part)


def print_legend(console: Console, quantities: Iterable[str | Definition]) -> None:
    """A line per quantity, given by its key or its definition: its symbol, its meaning and its unit."""
    for quantity in quantities:
        if found := define(quantity) if isinstance(quantity, str) else quantity:
            unit = f", in {found.unit}" if found.unit in UNITS and found.unit != "share" else ""
            print_sentence(console, f"{found.meaning}{unit}", first=f"{found.symbol}: ")


def print_sentence(console: Console, text: str, *, first: str = "", rest: str = "    ", style: str = "") -> None:
    """Text behind `first`, broken between words only, so that a path or a command stays whole."""
    lines = textwrap.wrap(
        text,
        console.width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True, style=style)


def _parts(console: Console, table: Table, keys: int, together: int) -> Iterator[Table]:
    """The table over as few parts as the width allows; whole where it is enough to fold its keys between words."""
    first, others = list(range(keys)), list(range(keys, len(table.columns)))
    whole = _of_columns(table, [*first, *others])
    if _width(console, whole) > console.width and _width(console, _folded(whole, keys)) <= console.width:
        yield _folded(whole, keys)
        return
    groups = [list(range(i, i + together)) for i in range(keys, len(table.columns), together)]
    chosen: list[int] = []
    for group in groups:
        if chosen and _width(console, _of_columns(table, [*first, *chosen, *group])) > console.width:
            yield _fitted(console, table, first, chosen)
            chosen = []
        chosen += group
    yield _fitted(console, table, first, chosen)


def _fitted(console: Console, table: Table, keys: Sequence[int], others: Sequence[int]) -> Table:
    part = _of_columns(table, [*keys, *others])
    return part if _width(console, part) <= console.width else _folded(part, len(keys))


def _folded(table: Table, keys: int) -> Table:
    """The table with its first columns as wide as their longest words."""
    from rich.cells import cell_len

    part = _of_columns(table, range(len(table.columns)))
    for column in part.columns[:keys]:
        words = [word for cell in (column.header, *column.cells) for word in str(cell).split()]
        column.no_wrap, column.overflow = False, "fold"
        column.max_width = max(map(cell_len, words), default=1)
    return part


def _of_columns(table: Table, chosen: Sequence[int]) -> Table:
    """The table with these columns only, untitled."""
    part = copy.copy(table)
    part.title = None
    part.columns = [replace(table.columns[i], _index=place) for place, i in enumerate(chosen)]
    return part


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(width=10_000)).maximum
