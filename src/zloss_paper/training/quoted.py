"""The ratios and differences from CE that the text of the paper quotes about a training table."""

from __future__ import annotations

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import Tested, judged
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.comparison import Missing, cell, near, ratio
from zloss_paper.engine.paper_methods import CE, STANDARD
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.table import Cell, Line, Table
from zloss_paper.training.against_ce import SYMBOLS, line_of


def quoted(label: str) -> Claim:
    """One claim for every number that the text quotes about a table; it needs the paper's own setting."""
    lines = list(paper_table("text:quoted_factors").table.find(table=label))

    def tests(table: Table) -> list[Tested]:
        if len(table) == 0:
            raise Missing("nothing was measured")
        deviating = next((line for line in table if line.deviations), None)
        if deviating is not None:
            raise Missing("numbers of the paper's own setting, from which these runs deviate")
        return [_quoted(table, line) for line in lines]

    numbers = "; ".join(
        f"{line.key['comparison']} {SYMBOLS[str(line.key['metric'])]} {line.cells['quoted'].value:g}" for line in lines
    )
    return Claim("quoted", f"The factors and differences from CE that the text quotes: {numbers}.", judged(tests),
                 "met within 5 % and the rounding of the printed cells")  # fmt: skip


def _quoted(table: Table, line: Line) -> Tested:
    comparison, column = str(line.key["comparison"]).partition(" (")[0], str(line.key["metric"])
    names = [_full_name(name) for name in comparison.split("/")]
    if line.key["kind"] == "ratio":
        a, b = (cell(line_of(table, name), column) for name in names)
        found = ratio(a, b)
    else:
        a, b = cell(line_of(table, names[0]), column), cell(line_of(table, CE), column)
        found = Cell(a.value - b.value, a.half_unit + b.half_unit)
    return near(found, line.cells["quoted"]), f"{line.key['comparison']}: {SYMBOLS[column]} {number(found.value)}"


def _full_name(name: str) -> str:
    return {"CE": CE, "Standard": STANDARD}.get(name, name)
