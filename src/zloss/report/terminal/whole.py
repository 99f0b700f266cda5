"""Tables wider than the terminal, printed whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_whole(console: Console, table: Table) -> None:
    """Print a table without cutting a number: one wider than the terminal runs over its edge."""
    width = console.width
    console.width = max(width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    try:
        console.print(table, crop=False)
    finally:
        console.width = width
