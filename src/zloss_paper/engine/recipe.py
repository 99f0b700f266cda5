"""A recipe: everything that reproduces one table, figure or passage of the paper.

A recipe has a label and a title, a function from profile to the full typed config, a run that turns a config into the
lines of a table, the paper's lines and its claims. Recipes of audits, training runs and kernels differ only in their
config and run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from zloss_paper.engine.claim import Claim
from zloss_paper.engine.paper_table import PaperTable
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.table import Table
from zloss_paper.engine.texts import TextSource
from zloss_paper.engine.workbench import Workbench

Config = TypeVar("Config")


@dataclass(frozen=True)
class RecipeResult:
    """What the run of a recipe returns."""

    table: Table
    notes: tuple[str, ...] = ()
    texts: tuple[TextSource, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further results for the JSON file."""
    draw: Callable[[Path], Sequence[Path]] | None = None
    """Writes the figures of this recipe into a folder."""


@dataclass(frozen=True)
class Recipe(Generic[Config]):
    """One label of the paper."""

    label: str
    title: str
    columns: tuple[str, ...]
    """Numbers of a line, in the order they are printed."""
    configure: Callable[[Profile, Overrides], Config]
    run: Callable[[Config, Workbench], RecipeResult]
    paper: PaperTable | None = None
    claims: tuple[Claim, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    """Setting the paper does not state (or the part of its name before a dot) → our choice."""
    restore: Callable[[Table, Mapping[str, Any]], Table] | None = None
    """Adds what claims read beyond the printed numbers, from the details of a kept result; None: they read nothing more."""

    @property
    def stem(self) -> str:
        """Name of its files."""
        return self.label.replace(":", "_")

    def unstated(self) -> dict[str, str]:
        """Every setting the paper leaves open, with our choice."""
        open_settings = () if self.paper is None else self.paper.not_stated
        return {name: self.choice(name) for name in open_settings}

    def choice(self, setting: str) -> str:
        """Our choice for one setting: its own, or that of its parent."""
        return self.choices[setting] if setting in self.choices else self.choices[setting.partition(".")[0]]
