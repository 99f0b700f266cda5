"""Tables for claims: the paper's own, and the same with some numbers changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zloss_paper.engine.registry import find_recipe
from zloss_paper.engine.table import Cell, Key, Table

Change = Callable[[float], float]


def own(label: str) -> Table:
    """The paper's table; an empty one, which decides no claim, where the paper describes runs without their numbers."""
    paper = find_recipe(label).paper
    return Table(()) if paper is None else paper.table


def verdict(label: str, claim: str, table: Table) -> str:
    """What a claim of the label says of a table."""
    (found,) = (one for one in find_recipe(label).claims if one.id == claim)
    return found.check(table).verdict


def changed(table: Table, column: str, change: Change, **key: Key) -> Table:
    """The table with one column of the lines with `key` changed."""
    touched = table.find(**key)
    assert touched
    return Table(
        tuple(
            replace(line, cells={**line.cells, column: Cell(change(line.cells[column].value))})
            if line in touched
            else line
            for line in table
        )
    )
