"""One recipe, run: its rows beside the paper's, the verdicts on its claims, our choices and the provenance."""

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
from zloss.results.reproduction import Choice, PaperVerdict, ReproducedClaim, ReproducedLine, ReproductionRecord
from zloss_paper.engine.claim import FAILS, Claim, Finding, Verdict
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Recipe
from zloss_paper.engine.table import Cell, Row, Table
from zloss_paper.engine.texts import TextSource
from zloss_paper.engine.workbench import Workbench


@dataclass(frozen=True)
class JudgedClaim:
    """A claim on our rows, and on the paper's own."""

    claim: Claim
    ours: Finding
    paper: Finding | None

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
        """Whether every row was measured at the paper's setting."""
        return bool(self.table.rows) and not any(row.deviations for row in self.table)

    @property
    def failed(self) -> tuple[JudgedClaim, ...]:
        return tuple(judged for judged in self.claims if judged.ours.verdict == FAILS)

    def count(self, verdict: Verdict) -> int:
        """Claims with this verdict on our rows."""
        return sum(judged.ours.verdict == verdict for judged in self.claims)

    def beside(self, row: Row) -> Row | None:
        """The paper's row that `row` is printed beside."""
        if self.recipe.paper is None:
            return None
        found = self.recipe.paper.table.find(**dict(row.beside or row.key))
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
            rows=tuple(self._line(row) for row in self.table),
            paper_rows=() if paper is None else tuple(_plain_row(row) for row in paper.table),
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

    def _line(self, row: Row) -> ReproducedLine:
        other = self.beside(row)
        return ReproducedLine(
            extra=_plain_row(row),
            reasons=dict(row.reasons),
            deviations=row.deviations,
            beside=None if other is None else _plain_row(other),
            ratio={
                column: ratio
                for column in self.recipe.columns
                if (ratio := ratio_of(row.cells.get(column), None if other is None else other.cells.get(column)))
                is not None
            },
        )


def reproduce(recipe: Recipe[Any], profile: Profile, overrides: Overrides, bench: Workbench) -> Reproduction:
    """Configure, run and judge one recipe."""
    started, begin = datetime.now(UTC), time.perf_counter()
    config = recipe.configure(profile, overrides)
    measured = recipe.run(config, bench)
    paper = recipe.paper
    return Reproduction(
        recipe=recipe,
        profile=profile,
        config=config,
        table=measured.table,
        claims=tuple(
            JudgedClaim(claim, claim.check(measured.table), None if paper is None else claim.check(paper.table))
            for claim in recipe.claims
        ),
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


def _plain_row(row: Row) -> dict[str, Any]:
    """Key and numbers of a row by column."""
    return {**row.key, **{column: cell.value for column, cell in row.cells.items()}}
