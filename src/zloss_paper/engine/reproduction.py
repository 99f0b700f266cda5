"""One recipe, run or read again: our lines next to the paper's, verdicts, our choices, provenance ("zloss.reproduction/1").

The smoke profile shows whether a recipe runs. Its few tokens and steps decide no claim, so none is evaluated there.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from zloss.errors import InputError
from zloss.report.document import to_markdown
from zloss.report.reproduction import reproduction_document
from zloss.results.files import read_record
from zloss.results.io import write_text
from zloss.results.provenance import ReproductionProvenance, shared_keys
from zloss.results.record import to_plain
from zloss.results.reproduction import (
    NOT_JUDGED,
    Choice,
    PaperVerdict,
    ReproducedClaim,
    ReproducedLine,
    ReproductionRecord,
)
from zloss_paper.engine.claims import FAILS, OPEN, Claim, Judgement
from zloss_paper.engine.recipe import Overrides, Profile, Recipe, RecipeResult
from zloss_paper.engine.table import Line, Table, cells_of
from zloss_paper.engine.workbench import Workbench


@dataclass(frozen=True)
class Reproduction:
    """The record of one recipe, with what it was made from."""

    recipe: Recipe[Any]
    config: Any
    table: Table
    record: ReproductionRecord
    draw: Callable[[Path], Sequence[Path]] | None = None

    @property
    def failed(self) -> bool:
        """Whether a claim does not hold."""
        return any(claim.verdict == FAILS for claim in self.record.claims)


def reproduce(recipe: Recipe[Any], profile: Profile, overrides: Overrides, bench: Workbench) -> Reproduction:
    """Configure, run and evaluate one recipe."""
    started, begin = datetime.now(UTC), time.perf_counter()
    config = recipe.configure(profile, overrides)
    measured = recipe.run(config, bench)
    provenance = ReproductionProvenance(
        **shared_keys(bench.command, started, round(time.perf_counter() - begin, 1)),
        python=platform.python_version(),
        threads=torch.get_num_threads(),
    )
    return _evaluated(recipe, profile, config, measured, provenance)


def rejudge(folder: Path, recipe: Recipe[Any]) -> Reproduction:
    """Evaluate the current claims on the stored numbers of `recipe` in `folder`. Nothing is run."""
    file = folder / f"{recipe.stem}.json"
    if not file.is_file():
        raise InputError(f"{folder} has no {file.name}: nothing to re-evaluate for {recipe.label}.")
    record = read_record(file, ReproductionRecord)
    kept = RecipeResult(
        kept_table(recipe, record), record.notes, record.texts, record.details, _kept_figures(folder, recipe)
    )
    return _evaluated(recipe, record.profile, record.config, kept, record.provenance)


NOT_MEASURED = "not measured in this run"


def kept_table(recipe: Recipe[Any], record: ReproductionRecord) -> Table:
    """The lines of a kept result; a column that the recipe has gained since was not measured."""
    unmeasured = {column: NOT_MEASURED for column in recipe.columns if column not in record.columns}
    keys = () if recipe.paper is None else tuple(recipe.paper.table.lines[0].key)
    table = Table(
        tuple(
            Line(
                key=line.key(record.columns),
                cells=cells_of(line.numbers(record.columns)),
                reasons=line.reasons | unmeasured,
                deviations=line.deviations,
                beside={name: line.beside[name] for name in keys if name in line.beside} if line.beside else {},
            )
            for line in record.rows
        )
    )
    return table if recipe.restore is None else recipe.restore(table, record.details)


def write_reproduction(folder: Path, result: Reproduction) -> list[Path]:
    """LABEL.json, LABEL.md and the figures of the recipe, if it has some."""
    record, page = folder / f"{result.recipe.stem}.json", folder / f"{result.recipe.stem}.md"
    figures = list(result.draw(folder / "figures")) if result.draw is not None else []
    result.record.write(record)
    relative = [Path(os.path.relpath(figure, folder)) for figure in figures]
    write_text(page, to_markdown(reproduction_document(result.record, relative)))
    return [record, page, *figures]


def _evaluated(
    recipe: Recipe[Any], profile: Profile, config: Any, result: RecipeResult, provenance: ReproductionProvenance
) -> Reproduction:
    """The record of a result, with every claim evaluated; it contains no local paths."""
    table, paper = result.table, recipe.paper
    record = ReproductionRecord(
        label=recipe.label,
        title=recipe.title,
        profile=profile,
        comparable=bool(table.lines) and not any(line.deviations for line in table),
        columns=recipe.columns,
        rows=tuple(_reproduced_line(recipe, line) for line in table),
        paper_rows=() if paper is None else tuple(_plain_line(line) for line in paper.table),
        claims=tuple(_reproduced_claim(recipe, claim, profile, table) for claim in recipe.claims),
        not_stated_by_the_paper=tuple(
            Choice(setting=setting, ours=ours) for setting, ours in recipe.unstated().items()
        ),
        notes=result.notes,
        config=_without_paths(to_plain(config)),
        texts=result.texts,
        details=to_plain(dict(result.details)),
        provenance=provenance,
    )
    return Reproduction(recipe, config, table, record, result.draw)


def _reproduced_claim(recipe: Recipe[Any], claim: Claim, profile: Profile, table: Table) -> ReproducedClaim:
    """A claim on our table and on the paper's own; at the smoke profile ours is not evaluated."""
    ours = Judgement(OPEN, NOT_JUDGED) if profile == "smoke" else claim.judge(table)
    paper = None if recipe.paper is None else claim.judge(recipe.paper.table)
    return ReproducedClaim(
        id=claim.id,
        statement=claim.statement,
        verdict=ours.verdict,
        evidence=ours.evidence,
        reading=claim.reading,
        on_the_papers_numbers=None if paper is None else PaperVerdict(verdict=paper.verdict, evidence=paper.evidence),
    )


def _reproduced_line(recipe: Recipe[Any], line: Line) -> ReproducedLine:
    other = recipe.beside(line)
    theirs = {} if other is None else other.cells
    return ReproducedLine(
        extra=_plain_line(line),
        reasons=dict(line.reasons),
        deviations=line.deviations,
        beside=None if other is None else _plain_line(other),
        ratio={
            column: line.cells[column].value / theirs[column].value
            for column in recipe.columns
            if column in line.cells and column in theirs and theirs[column].value
        },
        printed={column: cell.printed for column, cell in theirs.items() if cell.printed},
    )


def _plain_line(line: Line) -> dict[str, Any]:
    """Key and numbers of a line by column."""
    return {**line.key, **{column: cell.value for column, cell in line.cells.items()}}


def _without_paths(value: Any) -> Any:
    """The same values with existing files and folders by their last name."""
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if isinstance(value, str) and "/" in value and Path(value).exists():
        return Path(value).name
    return value


def _kept_figures(folder: Path, recipe: Recipe[Any]) -> Callable[[Path], Sequence[Path]] | None:
    """The figures that the kept page shows: they are not drawn again."""
    page = folder / f"{recipe.stem}.md"
    if not page.is_file():
        return None
    start = f"![{recipe.title}]("
    shown = [line[len(start) : -1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(start)]
    return (lambda figures: [folder / figure for figure in shown]) if shown else None
