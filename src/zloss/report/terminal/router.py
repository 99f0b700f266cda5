"""Routers on a terminal: the section of an audit, and a measured router scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zloss.report.tables.router import NamedLine, router_view, scale_lines
from zloss.results.router import MeasuredScale, RouterFindings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


def print_router(router: RouterFindings, console: Console | None = None) -> None:
    """What was measured, what is hypothetical, what the model's own loss applies, and what is missing."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(markup=False)
    view = router_view(router)
    for group in view.groups:
        console.print(Text(group.title, style="bold"))
        _print_lines(group.lines, console)
    for note in view.notes:
        console.print(Text(note, style="dim"))


def print_measured_scale(scale: MeasuredScale, console: Console | None = None) -> None:
    """The verdict in one sentence, then the numbers."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(markup=False)
    console.print(Text(f"Measured router Z-loss{f': {scale.name}' if scale.name else ''}", style="bold"))
    console.print(Text(scale.sentence))
    _print_lines(scale_lines(scale), console)


def _print_lines(lines: Sequence[NamedLine], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    table.add_column()
    for line in lines:
        table.add_row(Text(line.name), Text(line.text), Text(line.meaning, style="dim"))
    console.print(table)
