"""The report on a terminal: the numbers raw and centered, then the decision map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zloss.decide.bottom_line import bottom_line
from zloss.decide.next_command import NextCommand
from zloss.report.tables.head import head_definition, head_lines
from zloss.report.tables.side_by_side import differences
from zloss.report.tables.verdicts import effect_number, status, tally
from zloss.report.terminal.fitting import print_legend, print_table
from zloss.report.terminal.router import print_router
from zloss.report.text.numbers import factor, number
from zloss.report.text.summary import summarize
from zloss.results.audit import AuditReport
from zloss.results.decision import Decision
from zloss.results.quantities import BY_KEY, HEADLINE, symbol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MARKS = {"fired": ("● fired", "yellow"), "quiet": ("● quiet", "green"), "open": ("○ open", "dim")}
"""A verdict as a word, and its colour, by status."""
EXPLAINED_WIDTH = 120
"""Columns from which on the table of numbers has one for their meanings; below, a legend stands under it."""


def print_audit(report: AuditReport, console: Console | None = None, *, models: str | None = None) -> None:
    """Summary, table of numbers, decisions; `models` says which of several joined results is of which model."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(markup=False)
    # `Text`, not markup: a model or corpus name may hold square brackets.
    console.print(Text(f"{report.model.name} on {report.corpus.name}", style="bold"))
    facts = [
        f"{number(report.corpus.predictions)} predictions",
        f"PPL {number(report.ppl)}",
        f"V {number(report.model.vocab)}",
        f"D {number(report.model.width)}",
        f"{'tied' if report.model.tied else 'untied'} head",
    ]
    if beyond := report.model.rows_beyond_tokenizer:
        facts.append(f"{number(beyond)} rows of V beyond the tokenizer")
    console.print(Text(", ".join(facts), style="dim"))
    for sentence in summarize(report):
        console.print(Text(sentence))
    explained = console.width >= EXPLAINED_WIDTH
    print_table(console, numbers_table(report, explained=explained), keys=4)
    if not explained:
        headline = (head_definition(key, report) for key in HEADLINE)
        print_legend(console, (*headline, *(("r_z", "c_z") if report.gradient is not None else ())))
    console.print(Text("Other symbols and keys: zloss glossary WORD", style="dim"))
    if report.router is not None:
        print_router(report.router, console)
    if report.decisions:
        print_decisions(report.decisions, console, models=models)


def numbers_table(report: AuditReport, *, explained: bool = False) -> Table:
    """Every measured number of the head, and R_Z, C_Z; with `explained` their meanings beside them."""
    rows = [
        (line.label, line.label.axis, number(line.raw), number(line.centered), factor(line.ratio))
        for line in head_lines(report)
    ]
    if report.gradient is not None:
        raw, centered = report.gradient.raw, report.gradient.centered
        ratio = centered.r_z / raw.r_z if raw.r_z and centered.r_z is not None else None
        rows.append((BY_KEY["r_z"], symbol("r_z"), number(raw.r_z), number(centered.r_z), factor(ratio)))
        rows.append((BY_KEY["c_z"], symbol("c_z"), number(raw.c_z), number(centered.c_z), ""))
    table = _table("quantity", "raw", "centered", "centered / raw")
    if explained:
        table.add_column("meaning", overflow="fold")
    for definition, *cells in rows:
        table.add_row(*cells, *([definition.meaning] if explained else []))
    return table


def print_decisions(
    decisions: Sequence[Decision], console: Console | None = None, *, models: str | None = None
) -> None:
    """The eight stages with verdict and reason; under a fired one its action and what it would change."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(markup=False)
    console.print(Text(f"Decision map: {tally(decisions)}", style="bold"))
    if models is not None:
        console.print(Text(models))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for decision in decisions:
        mark, style = MARKS[status(decision)]
        text = Text(decision.reason)
        if decision.fired:
            text.append(f"\n→ {decision.action}", style="bold")
            if effects := _effects(decision):
                text.append("\n" + "; ".join(effects), style="dim")
        table.add_row(Text(mark, style=style), Text(decision.stage), text)
    console.print(table)
    console.print(Text(bottom_line(decisions), style="bold"))


def print_next_command(command: NextCommand, console: Console | None = None) -> None:
    """The command that would tell most, on a line of its own that can be copied whole."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(markup=False)
    console.print(Text(f"Next: {command.why}."))
    console.print(Text(f"  {command.line}", style="bold"), soft_wrap=True)


def _effects(decision: Decision) -> list[str]:
    return [
        f"{symbol(effect.quantity)} {effect_number(effect, effect.before)} → {effect_number(effect, effect.after)}"
        for effect in decision.measured
        # The λ on budget is the same for every stage and is part of the summary.
        if effect.unit != "λ"
    ]


def print_side_by_side(
    named: Sequence[tuple[str, AuditReport]], console: Console | None = None, *, models: Sequence[str | None] = ()
) -> None:
    """A column per audit and coordinate, then the verdicts stage by stage."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(markup=False)
    for sentence in differences(named):
        console.print(Text(sentence))
    columns = [(name, report, coordinate) for name, report in named for coordinate in ("raw", "centered")]
    table = _table("", *(f"{name if coordinate == 'raw' else ''}\n{coordinate}" for name, _, coordinate in columns))
    table.add_row("PPL", *(number(report.ppl) for _, report, _ in columns))
    for key in (*HEADLINE, "sigma_1", "e_16", "f_16"):
        values = (getattr(getattr(report.heads, coordinate), key) for _, report, coordinate in columns)
        table.add_row(symbol(key), *(number(value) for value in values))
    gradients = [getattr(report.gradient, coordinate, None) for _, report, coordinate in columns]
    for key in ("r_z", "c_z"):
        table.add_row(symbol(key), *(number(getattr(gradient, key, None)) for gradient in gradients))
    print_table(console, table, together=2)
    print_legend(console, (*HEADLINE, "r_z"))
    verdicts = _table("stage", *(name for name, _ in named), left=1 + len(named))
    for decisions in zip(*(report.decisions for _, report in named), strict=True):
        cells = []
        for decision in decisions:
            mark, style = MARKS[status(decision)]
            value = f" {number(decision.value)}" if decision.value is not None else ""
            cells.append(Text(f"{mark}{value}", style=style))
        verdicts.add_row(decisions[0].stage, *cells)
    print_table(console, verdicts)
    for sentence in dict.fromkeys(one for one in models if one is not None):
        console.print(Text(sentence))


def _table(*columns: str, left: int = 1) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    headers = (Column(name, justify="left" if i < left else "right", no_wrap=True) for i, name in enumerate(columns))
    return Table(*headers, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
