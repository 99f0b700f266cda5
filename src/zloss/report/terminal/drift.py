"""Drift on a terminal: a line per checkpoint, the finding, and what moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zloss.report.tables.drift import NARROW, STATES, drift_lines, drift_titles, movement_name
from zloss.report.terminal.fitting import print_legend, print_table
from zloss.report.text.numbers import number
from zloss.results.drift import Drift

if TYPE_CHECKING:
    from rich.console import Console

MARKS = {"invisible": ("●", "yellow"), "with_ce": ("●", "green"), "quiet": ("●", "green"), "open": ("○", "dim")}


def print_drift(drift: Drift, console: Console | None = None) -> None:
    """The table, the finding, and a line per number that moved; at most 80 columns wide."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = console or Console(markup=False)
    predictions = drift.blocks * drift.block_size
    # `Text`, not markup: a name may hold square brackets.
    console.print(Text(f"{drift.model}: {len(drift.checkpoints)} checkpoints on {drift.corpus}", style="bold"))
    console.print(Text(f"{number(predictions)} predictions, ΔCE in nats from the checkpoint before", style="dim"))
    titles = [title.replace(" centered", "\ncentered").replace(" raw", "\nraw") for title in drift_titles(NARROW)]
    columns = [Column(title, justify="right", no_wrap=True) for title in ("step", *titles)]
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for line in drift_lines(drift, NARROW, digits=3):
        style = "yellow" if drift.began is not None and line.step >= drift.began else None
        table.add_row(str(line.step), *(text for text, _ in line.cells), style=style)
    print_table(console, table)
    print_legend(console, dict.fromkeys(key for _, key in NARROW))
    for note in drift.notes:
        console.print(Text(note))
    console.print(Text(drift.finding, style="bold"))
    shown = [movement for movement in drift.movements if movement.state in ("invisible", "with_ce")]
    if not shown:
        return
    moved = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for movement in shown:
        mark, style = MARKS[movement.state]
        change = f"{number(movement.before)} → {number(movement.after)}"
        began = f"first seen at step {movement.began}, {STATES[movement.state]}"
        moved.add_row(Text(mark, style=style), movement_name(movement), change, began)
    console.print(moved)
