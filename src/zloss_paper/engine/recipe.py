"""A recipe: everything that reproduces one table, figure or passage of the paper.

A recipe has a label and a title, a function from profile to the full typed config, a run that turns a config into the
lines of a table, the paper's lines and its claims. Recipes of audits, training runs and kernels differ only in their
config and run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar

from zloss.results.reproduction import Profile as Profile
from zloss_paper.engine.claims import Claim
from zloss_paper.engine.inputs import TextSource
from zloss_paper.engine.table import PaperTable, Table
from zloss_paper.engine.workbench import Workbench


@dataclass(frozen=True)
class Overrides:
    """Models, texts and counts that replace those of a recipe; everything else stays."""

    models: tuple[str, ...] = ()
    """NAME=FOLDER takes a model of the paper from a folder, NAME alone selects it; anything else is another model."""
    texts: tuple[str, ...] = ()
    text_source: str = ""
    blocks: int | None = None
    block_size: int | None = None
    reports: tuple[str, ...] = ()
    """Results to read instead of running anything (the reporting checklist)."""


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
    restore: Callable[[Table, Mapping[str, Any]], Table] | None = None
    """Adds what claims read beyond the printed numbers, from the details of a kept result; None: they read nothing more."""

    @property
    def stem(self) -> str:
        """Name of its files."""
        return self.label.replace(":", "_")

    def unstated(self) -> dict[str, str]:
        """Every setting the paper leaves open, with our choice (`data/choices.json`: those that a family shares, and those of
        the label); model_ids.GPT-2 has that of model_ids."""
        data = json.loads(resources.files("zloss_paper").joinpath("data/choices.json").read_text(encoding="utf-8"))
        own: dict[str, str] = data["labels"].get(self.label, {})
        choices = {**data["shared"].get(own.get("shared"), {}), **own}
        settings = () if self.paper is None else self.paper.not_stated
        return {name: choices.get(name) or choices[name.partition(".")[0]] for name in settings}
