"""One recipe, run: lines beside the paper's, verdicts, our choices, provenance (schema "zloss.reproduction/1").

The smoke profile tells whether a recipe runs. Its few tokens and steps decide no claim, so none is judged there.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

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
from zloss_paper.engine.claim import FAILS, OPEN, Claim, Judgement
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Recipe
from zloss_paper.engine.table import Cell, Line, Table
from zloss_paper.engine.texts import TextSource
from zloss_paper.engine.workbench import Workbench


@dataclass(frozen=True)
class JudgedClaim:
    """A claim judged on our lines, and on the paper's own."""

    claim: Claim
    ours: Judgement
    paper: Judgement | None

    def record(self) -> ReproducedClaim:
        """The claim and its verdicts, without its check."""
        paper = self.paper
        return ReproducedClaim(
            id=self.claim.id,
            statement=self.claim.statement,
            verdict=self.ours.verdict,
            evidence=self.ours.evidence,
            reading=self.claim.reading,
            on_the_papers_numbers=(
                None if paper is None else PaperVerdict(verdict=paper.verdict, evidence=paper.evidence)
            ),
        )


@dataclass(frozen=True)
class Reproduction:
    """The result of one recipe, with the recipe itself."""

    recipe: Recipe[Any]
    profile: Profile
    config: Any
    table: Table
    claims: tuple[JudgedClaim, ...]
    texts: tuple[TextSource, ...]
    notes: tuple[str, ...]
    provenance: ReproductionProvenance
    details: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[Path], Sequence[Path]] | None = None

    @property
    def comparable(self) -> bool:
        """Whether every line was measured at the paper's setting."""
        return bool(self.table.lines) and not any(line.deviations for line in self.table)

    @property
    def failed(self) -> tuple[JudgedClaim, ...]:
        return tuple(judged for judged in self.claims if judged.ours.verdict == FAILS)

    def beside(self, line: Line) -> Line | None:
        """The paper's line that `line` is printed beside."""
        if self.recipe.paper is None:
            return None
        found = self.recipe.paper.table.find(**dict(line.beside or line.key))
        return found[0] if found else None

    def to_dict(self) -> dict[str, Any]:
        """The JSON file of this result."""
        return self.record().to_dict()

    def record(self) -> ReproductionRecord:
        """This result without its recipe; no path of the machine it ran on."""
        paper = self.recipe.paper
        return ReproductionRecord(
            label=self.recipe.label,
            title=self.recipe.title,
            profile=self.profile,
            comparable=self.comparable,
            columns=self.recipe.columns,
            rows=tuple(self._line(line) for line in self.table),
            paper_rows=() if paper is None else tuple(_plain_line(line) for line in paper.table),
            claims=tuple(judged.record() for judged in self.claims),
            not_stated_by_the_paper=tuple(
                Choice(setting=setting, ours=ours) for setting, ours in self.recipe.unstated().items()
            ),
            notes=self.notes,
            config=without_paths(to_plain(self.config)),
            texts=self.texts,
            details=to_plain(self.details),
            provenance=self.provenance,
        )

    def _line(self, line: Line) -> ReproducedLine:
        other = self.beside(line)
        return ReproducedLine(
            extra=_plain_line(line),
            reasons=dict(line.reasons),
            deviations=line.deviations,
            beside=None if other is None else _plain_line(other),
            ratio={
                column: ratio
                for column in self.recipe.columns
                if (ratio := ratio_of(line.cells.get(column), None if other is None else other.cells.get(column)))
                is not None
            },
            printed={}
            if other is None
            else {column: cell.printed for column, cell in other.cells.items() if cell.printed},
        )


def reproduce(recipe: Recipe[Any], profile: Profile, overrides: Overrides, bench: Workbench) -> Reproduction:
    """Configure, run and judge one recipe."""
    started, begin = datetime.now(UTC), time.perf_counter()
    config = recipe.configure(profile, overrides)
    measured = recipe.run(config, bench)
    return Reproduction(
        recipe=recipe,
        profile=profile,
        config=config,
        table=measured.table,
        claims=judged_claims(recipe, profile, measured.table),
        texts=measured.texts,
        notes=measured.notes,
        details=dict(measured.details),
        draw=measured.draw,
        provenance=ReproductionProvenance(
            **shared_keys(bench.command, started, round(time.perf_counter() - begin, 1)),
            python=platform.python_version(),
            threads=torch.get_num_threads(),
        ),
    )


def judged_claims(recipe: Recipe[Any], profile: Profile, table: Table) -> tuple[JudgedClaim, ...]:
    """Every claim of a recipe on our table and on the paper's own; at the smoke profile ours is not judged."""
    paper = recipe.paper
    smoke = Judgement(OPEN, NOT_JUDGED)
    return tuple(
        JudgedClaim(
            claim,
            smoke if profile == "smoke" else claim.check(table),
            None if paper is None else claim.check(paper.table),
        )
        for claim in recipe.claims
    )


def ratio_of(ours: Cell | None, paper: Cell | None) -> float | None:
    """ours / paper, where both exist and the paper's is not 0."""
    return None if ours is None or paper is None or not paper.value else ours.value / paper.value


def without_paths(value: Any) -> Any:
    """The same values with existing files and folders by their last name, so that no path of this machine is written."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if isinstance(value, str) and "/" in value and Path(value).exists():
        return Path(value).name
    return value


def _plain_line(line: Line) -> dict[str, Any]:
    """Key and numbers of a line by column."""
    return {**line.key, **{column: cell.value for column, cell in line.cells.items()}}
