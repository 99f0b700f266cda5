"""A kept LABEL.json as a reproduction again: its claims are judged from the numbers it holds, and nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zloss.errors import InputError
from zloss.results.reproduction import ReproducedLine, ReproductionRecord, read_reproduction_record
from zloss_paper.engine.recipe import Recipe
from zloss_paper.engine.reproduction import Reproduction, judged_claims
from zloss_paper.engine.table import Key, Line, Table, cells_of

NOT_MEASURED = "not measured in this run"


def rejudge(folder: Path, recipe: Recipe[Any]) -> Reproduction:
    """The result of `recipe` in `folder`, with the claims of today on the numbers of then."""
    file = folder / f"{recipe.stem}.json"
    if not file.is_file():
        raise InputError(f"{folder} has no {file.name}: nothing to judge again for {recipe.label}.")
    record = read_reproduction_record(file)
    table = kept_table(recipe, record)
    return Reproduction(
        recipe=recipe,
        profile=record.profile,
        config=record.config,
        table=table,
        claims=judged_claims(recipe, record.profile, table),
        texts=record.texts,
        notes=record.notes,
        details=record.details,
        draw=_drawn(folder, recipe),
        provenance=record.provenance,
    )


def kept_table(recipe: Recipe[Any], record: ReproductionRecord) -> Table:
    """The lines of a kept result; a column that the recipe has learned since was not measured."""
    table = Table(tuple(_line(recipe, record, line) for line in record.rows))
    return table if recipe.restore is None else recipe.restore(table, record.details)


def _line(recipe: Recipe[Any], record: ReproductionRecord, line: ReproducedLine) -> Line:
    columns = tuple(dict.fromkeys((*recipe.columns, *record.columns)))
    unknown = [column for column in recipe.columns if column not in record.columns]
    return Line(
        key=line.key(columns),
        cells=cells_of(line.numbers(columns)),
        reasons=line.reasons | dict.fromkeys(unknown, NOT_MEASURED),
        deviations=line.deviations,
        beside=_beside(recipe, line),
    )


def _beside(recipe: Recipe[Any], line: ReproducedLine) -> dict[str, Key]:
    """Key of the paper's line that a kept line was printed beside."""
    if recipe.paper is None or line.beside is None:
        return {}
    return {name: line.beside[name] for name in recipe.paper.key_columns if name in line.beside}


def _drawn(folder: Path, recipe: Recipe[Any]) -> Callable[[Path], Sequence[Path]] | None:
    """The figures that the kept page shows: they are not drawn again."""
    page = folder / f"{recipe.stem}.md"
    if not page.is_file():
        return None
    start = f"![{recipe.title}]("
    shown = [line[len(start) : -1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(start)]
    return (lambda figures: [folder / figure for figure in shown]) if shown else None
