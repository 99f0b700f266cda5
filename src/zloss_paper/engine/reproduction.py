"""One recipe, run: lines beside the paper's, verdicts, our choices, provenance (schema "zloss.reproduction/1")."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import torch

import zloss
from zloss.results.record import to_plain
from zloss_paper.engine.claim import FAILS, Claim, Judgement, Verdict
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


@dataclass(frozen=True)
class Reproduction:
    """The result of one recipe."""

    SCHEMA: ClassVar[str] = "zloss.reproduction/1"

    recipe: Recipe[Any]
    profile: Profile
    config: Any
    table: Table
    claims: tuple[JudgedClaim, ...]
    texts: tuple[TextSource, ...]
    notes: tuple[str, ...]
    provenance: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[Path], Sequence[Path]] | None = None

    @property
    def comparable(self) -> bool:
        """Whether every line was measured at the paper's setting."""
        return bool(self.table.lines) and not any(line.deviations for line in self.table)

    @property
    def failed(self) -> tuple[JudgedClaim, ...]:
        return tuple(judged for judged in self.claims if judged.ours.verdict == FAILS)

    def count(self, verdict: Verdict) -> int:
        """Claims with this verdict on our lines."""
        return sum(judged.ours.verdict == verdict for judged in self.claims)

    def beside(self, line: Line) -> Line | None:
        """The paper's line that `line` is printed beside."""
        if self.recipe.paper is None:
            return None
        found = self.recipe.paper.table.find(**dict(line.beside or line.key))
        return found[0] if found else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; no path of the machine it ran on."""
        paper = self.recipe.paper
        return {
            "schema": self.SCHEMA,
            "label": self.recipe.label,
            "title": self.recipe.title,
            "profile": self.profile,
            "comparable": self.comparable,
            "columns": list(self.recipe.columns),
            "rows": [self._line(line) for line in self.table],
            "paper_rows": [] if paper is None else [{**line.key, **_values(line)} for line in paper.table],
            "claims": [
                {
                    "id": judged.claim.id,
                    "statement": judged.claim.statement,
                    "verdict": judged.ours.verdict,
                    "evidence": judged.ours.evidence,
                    "reading": judged.claim.reading,
                    "on_the_papers_numbers": None if judged.paper is None else to_plain(judged.paper),
                }
                for judged in self.claims
            ],
            "not_stated_by_the_paper": [
                {"setting": setting, "ours": ours} for setting, ours in self.recipe.unstated().items()
            ],
            "notes": list(self.notes),
            "config": without_paths(to_plain(self.config)),
            "texts": to_plain(self.texts),
            "details": to_plain(self.details),
            "provenance": to_plain(self.provenance),
        }

    def _line(self, line: Line) -> dict[str, Any]:
        other = self.beside(line)
        return {
            **line.key,
            **_values(line),
            "reasons": dict(line.reasons),
            "deviations": list(line.deviations),
            "beside": None if other is None else {**other.key, **_values(other)},
            "ratio": {
                column: ratio
                for column in self.recipe.columns
                if (ratio := ratio_of(line.cells.get(column), None if other is None else other.cells.get(column)))
                is not None
            },
        }


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
        provenance={
            "zloss": zloss.__version__,
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
            "python": platform.python_version(),
            "command": bench.command,
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - begin, 1),
            "threads": torch.get_num_threads(),
        },
    )


def ratio_of(ours: Cell | None, paper: Cell | None) -> float | None:
    """ours / paper, where both exist and the paper's is not 0."""
    return None if ours is None or paper is None or not paper.value else ours.value / paper.value


def without_paths(value: Any) -> Any:
    """Existing files and folders by their last name: a result names no place on a disk."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if isinstance(value, str) and "/" in value and Path(value).exists():
        return Path(value).name
    return value


def _values(line: Line) -> dict[str, float]:
    return {column: cell.value for column, cell in line.cells.items()}
