"""A reproduction on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zloss_paper.engine.claim import FAILS, HOLDS, OPEN
from zloss_paper.engine.reproduction import Reproduction
from zloss_paper.show.layout import NOT_COMPARABLE, deviations, header, missing, printed_lines, tally

if TYPE_CHECKING:
    from rich.console import Console

MARKS = {HOLDS: ("●", "green"), FAILS: ("●", "red"), OPEN: ("○", "dim")}
STYLES = {"ours": "", "paper": "cyan", "ratio": "dim"}


def print_reproduction(result: Reproduction, console: Console | None = None) -> None:
    """Title, table, what deviates, verdicts, our choices."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = console or Console()
    console.print(Text(f"{result.recipe.label}: {result.recipe.title} ({result.profile} profile)", style="bold"))
    names, body = header(result), printed_lines(result)
    keys = len(names) - len(result.recipe.columns)
    columns = [
        Column(name, justify="left" if i < keys else "right", no_wrap=bool(result.recipe.columns))
        for i, name in enumerate(names)
    ]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for line in body:
        table.add_row(*(Text(cell) for cell in line.cells), style=STYLES[line.style])
    width = console.width
    # Numbers are never cut: a table wider than the terminal runs over its edge.
    if result.recipe.columns:
        console.width = max(width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table, crop=False)
    console.width = width
    if result.recipe.columns and not result.comparable:
        console.print(Text(NOT_COMPARABLE))
        for deviation in deviations(result):
            console.print(Text(f"  {deviation}", style="dim"))
    for sentence in (*missing(result), *result.notes):
        console.print(Text(sentence, style="dim"))
    if result.claims:
        _print_claims(result, console)
    if choices := result.recipe.unstated():
        console.print(Text("Not stated by the paper, so our choice:"))
        for sentence, settings in _grouped(choices).items():
            console.print(Text(f"  {', '.join(settings)}: {sentence}", style="dim"))


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
