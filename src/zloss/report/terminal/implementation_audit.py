"""An implementation audit on a terminal: four tables, then what the decision map reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zloss.report.tables.implementation_audit import LEGENDS, TitledTable, implementation_tables
from zloss.report.tables.verdicts import status
from zloss.report.terminal.audit import MARKS
from zloss.report.terminal.fitting import print_sentence, print_table
from zloss.report.text.numbers import number
from zloss.results.decision import Decision
from zloss.results.implementation_audit import ImplementationAudit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_implementation_audit(
    audit: ImplementationAudit, decisions: Sequence[Decision] = (), console: Console | None = None
) -> None:
    """Headline, a table per section, notes; `decisions` are the stages that the audit evaluates."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(markup=False)
    # `Text`, not markup: a model or corpus name may hold square brackets.
    console.print(Text(f"{audit.model.name} on {audit.corpus.name}", style="bold"))
    shape = f"{number(audit.corpus.predictions)} tokens, V {number(audit.model.vocab)}, λ {audit.coef:g}, "
    console.print(Text(f"{shape}c {audit.target:.4g}", style="dim"))
    for section in implementation_tables(audit, narrow=True):
        console.print(Text(section.title, style="bold"))
        if section.missing:
            console.print(Text(f"– {section.missing}"))
        else:
            print_table(console, _table(section))
            for name, meaning in LEGENDS[section.title].items():
                print_sentence(console, meaning, first=f"{name}: ")
    if any(line.interpreted for line in audit.implementations):
        console.print(Text("* on Triton's interpreter, which cuts bf16 off where a GPU rounds", style="dim"))
    for sentence in audit.notes:
        console.print(Text(sentence, style="dim"))
    for decision in decisions:
        mark, style = MARKS[status(decision)]
        console.print(Text.assemble((f"{mark} ", style), (f"{decision.stage}: ", "bold"), decision.reason))
        if decision.fired:
            console.print(Text(f"  → {decision.action}", style="bold"))


def _table(section: TitledTable) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(section.first, no_wrap=True)
    for title in section.table.columns:
        table.add_column(title, justify="right", no_wrap=True)
    for name, cells in section.table.lines:
        table.add_row(name, *(text for text, _ in cells))
    return table
