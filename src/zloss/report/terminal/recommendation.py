"""A recommendation on a terminal: what to do, how sure, why, what it costs, what is not guaranteed, and what to paste."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zloss.report.tables.recommendation import ARM_TITLES, arm_lines, confirmation_lines, seeds_sentence
from zloss.report.tables.verdicts import status
from zloss.report.terminal.audit import MARKS
from zloss.report.text.numbers import seconds
from zloss.results.recommend_plan import RecommendPlan
from zloss.results.recommendation import Recommendation

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"confirmed here": "green", "direction only": "yellow", "undecided": "dim"}


def print_recommendation(found: Recommendation, console: Console | None = None) -> None:
    """The whole answer; at most 80 columns wide where the terminal is."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = console or Console(markup=False)
    # `Text`, not markup: a name may hold square brackets.
    console.print(Text(found.action, style="bold"))
    console.print(Text(found.confidence, style=STYLES[found.level]))
    for title, sentences in (
        ("why", found.why),
        ("cost", found.cost),
        ("not guaranteed", found.not_guaranteed),
        ("notes", found.notes),
    ):
        if sentences:
            console.print(Text(title, style="bold"))
            for sentence in sentences:
                console.print(Text(f"  {sentence}"))
    console.print(Text("stages", style="bold"))
    stages = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for decision in found.stages:
        mark, style = MARKS[status(decision)]
        stages.add_row(Text(mark, style=style), decision.stage, Text(decision.reason))
    console.print(stages)
    if found.arms:
        console.print(Text("arms on the selecting seed", style="bold"))
        right = [Column(title, justify="right", no_wrap=True) for title in ARM_TITLES[2:]]
        table = Table(
            Column(ARM_TITLES[0]), Column(ARM_TITLES[1]), *right, box=None, pad_edge=False, padding=(0, 2, 0, 0)
        )
        for line in arm_lines(found):
            table.add_row(*line.cells)
        console.print(table)
        console.print(Text(seeds_sentence(found), style="dim"))
    for label, verdict, parts in confirmation_lines(found):
        console.print(Text(f"{label} on confirmation: {verdict}", style="bold"))
        for name, state, reason in parts:
            console.print(Text(f"  {name} {state}: {reason}"))
    for paste in found.paste:
        near = "" if paste.exact else ", nearest" if paste.lines else ""
        console.print(Text(f"{paste.where}{near}", style="bold"))
        if not paste.lines:
            console.print(Text(f"  {paste.note}"))
        for text in paste.lines.splitlines():
            # Never broken over two lines: it is copied as it stands.
            console.print(Text(f"  {text}"), soft_wrap=True)
    budget = "" if found.budget_seconds is None else f" of {seconds(found.budget_seconds)}"
    console.print(Text(f"{seconds(found.seconds)}{budget}", style="dim"))


def print_plan(plan: RecommendPlan, console: Console | None = None) -> None:
    """The arms as settings, and how their runs come back."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(markup=False)
    console.print(Text(f"{plan.model} on {plan.text}: {len(plan.arms)} arms", style="bold"))
    table = Table("arm", "objective", "why", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for arm in plan.arms:
        table.add_row(Text(arm.label), Text(arm.code), Text(", ".join(arm.stages) or arm.note))
    console.print(table)
    settings = ", ".join(f"{key} {value}" for key, value in plan.settings.items())
    console.print(Text(f"the same for every arm: {settings}"))
    console.print(Text(f"seeds {', '.join(map(str, plan.seeds))}: the first selects, the others confirm"))
    console.print(
        Text("record each run with zloss.record_run(DIR, …); then: zloss recommend MODEL --runs DIR", style="dim")
    )
