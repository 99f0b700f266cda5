"""The audit of a loss on a terminal: what it applies, then the verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zloss.report.text.loss_answer import (
    bottom_line,
    headline,
    other_answers,
    severity,
    source_line,
    target_model_lines,
    what_to_do,
)
from zloss.results.loss_audit import LossAudit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MARKS = {
    "error": ("✗ error", "bold red"),
    "warning": ("! warning", "yellow"),
    "note": ("i note", "cyan"),
    "pass": ("✓ pass", "green"),
    "not_applicable": ("· not applicable", "dim"),
}
"""What stands before a sentence: the severity of a finding, else its verdict."""


def print_loss_audit(
    audit: LossAudit, console: Console | None = None, *, whole: bool = False, elsewhere: str = "the JSON file has them"
) -> None:
    """Headline, identified objective, source error, the findings, and how many other questions there were.

    `whole` prints every question with its answer; `elsewhere` says where they stand otherwise.
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console(markup=False)
    # `Text`, not markup: names of losses may hold square brackets.
    console.print(Text(str(audit.provenance.get("loss", "loss")), style="bold"))
    console.print(Text(headline(audit)))
    console.print(Text(source_line(audit), style="dim"))
    for sentence in target_model_lines(audit):
        console.print(Text(sentence, style="dim"))
    if whole or audit.found:
        console.print(verdict_table(audit, whole=whole))
    if not whole and (counted := other_answers(audit)):
        console.print(Text(f"{counted}; {elsewhere}.", style="dim"))
    text, style = bottom_line(audit)
    console.print(Text(text, style=style))
    if remedy := what_to_do(audit):
        console.print(Text(remedy))


def verdict_table(audit: LossAudit, *, whole: bool = True) -> Table:
    """One line per question: errors, warnings and notes first, then, if `whole`, passes and what was not asked."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False, pad_edge=False)
    for column in ("verdict", "id", "sentence"):
        table.add_column(column, no_wrap=column != "sentence")
    order = list(MARKS)
    for finding in sorted(audit.findings if whole else audit.found, key=lambda item: order.index(severity(item))):
        mark, style = MARKS[severity(finding)]
        table.add_row(Text(mark, style=style), finding.id, Text(finding.sentence))
    return table
