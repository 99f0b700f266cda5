"""Tables for claims: the paper's own, and the same with some numbers changed; recipes run at the smoke profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from zloss_paper.engine.recipe import MODULES, Overrides, find_recipe
from zloss_paper.engine.reproduction import Reproduction, reproduce
from zloss_paper.engine.table import Cell, Key, Line, Table
from zloss_paper.engine.workbench import Workbench

Change = Callable[[float], float]
_TRAINED = [label for label, module in MODULES.items() if module in ("training.low_coefficient", "training.stress")]
TABLES = tuple(label for label in _TRAINED if label.startswith("tab:"))
"""Matched training runs that the paper prints."""
DESCRIBED = tuple(label for label in _TRAINED if label.startswith("text:"))
TRAINING = (*TABLES, *DESCRIBED, "text:paired_differences")


def own(label: str) -> Table:
    """The paper's table; an empty one, which decides no claim, where the paper describes runs without their numbers."""
    paper = find_recipe(label).paper
    return Table(()) if paper is None else paper.table


def verdict(label: str, claim: str, table: Table) -> str:
    """What a claim of the label says of a table."""
    (found,) = (one for one in find_recipe(label).claims if one.id == claim)
    return found.judge(table).verdict


def times(factor: float) -> Change:
    return lambda value: value * factor


def changed(table: Table, column: str, change: Change, key: Mapping[str, Key], *, rounded: bool = False) -> Table:
    """The table with one column of the lines with `key` changed; `rounded`: each keeps the rounding of its cell."""

    def change_line(line: Line) -> Line:
        if line not in touched:
            return line
        old = line.cells[column]
        return replace(line, cells={**line.cells, column: Cell(change(old.value), old.half_unit if rounded else 0.0)})

    touched = [line for line in table.find(**key) if column in line.cells]
    assert touched
    return Table(tuple(change_line(line) for line in table))


def smoke(label: str, overrides: Overrides, bench: Workbench) -> Reproduction:
    """The recipe at the smoke profile."""
    return reproduce(find_recipe(label), "smoke", overrides, bench)


def verdicts(result: Reproduction) -> dict[str, str]:
    """Every claim on the measured lines; a smoke result itself evaluates none."""
    return {claim.id: claim.judge(result.table).verdict for claim in result.recipe.claims}
