"""A recipe: everything that reproduces one table, figure or passage of the paper.

A recipe has a label and a title, a function from profile to the full typed config, a run that turns a config into the
lines of a table, the paper's lines and its claims. Recipes of audits, training runs and kernels differ only in their
config and run. The module of a recipe is imported when its label is requested.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar

from zloss.errors import UnknownNameError
from zloss.results.reproduction import Profile as Profile
from zloss_paper.engine.claims import Claim
from zloss_paper.engine.inputs import TextSource
from zloss_paper.engine.table import Line, PaperTable, Table
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

    def beside(self, line: Line) -> Line | None:
        """The paper's line next to which `line` is printed; keys that the paper's table does not have are ignored."""
        if self.paper is None:
            return None
        table = self.paper.table
        key = {name: value for name, value in line.beside.items() if name in table.lines[0].key} or dict(line.key)
        return next(iter(table.find(**key)), None)

    def unstated(self) -> dict[str, str]:
        """Every setting the paper leaves open, with our choice (`data/choices.json`: those that a family shares, and those of
        the label); model_ids.GPT-2 has that of model_ids."""
        data = json.loads(resources.files("zloss_paper").joinpath("data/choices.json").read_text(encoding="utf-8"))
        own: dict[str, str] = data["labels"].get(self.label, {})
        choices = {**data["shared"].get(own.get("shared"), {}), **own}
        settings = () if self.paper is None else self.paper.not_stated
        return {name: choices.get(name) or choices[name.partition(".")[0]] for name in settings}


MODULES = {
    "tab:pretrained": "heads.tables",
    "tab:fineweb_pretrained": "heads.tables",
    "tab:spectral_audit": "heads.tables",
    "text:gradient_geometry": "heads.gradients",
    "text:tied_paths": "heads.gradients",
    "tab:router": "moe.router_table",
    "tab:source_audit": "implementations.source_audit",
    "text:source_audit_fineweb": "implementations.source_audit",
    "text:source_audit_medium": "implementations.source_audit",
    "text:pytorch_backward_audit": "implementations.kernel_audit",
    "tab:triton_fused": "implementations.kernel_audit",
    "text:fused_audit_medium": "implementations.kernel_audit",
    "tab:update_audit": "implementations.update_audit",
    "text:update_audit_fp16": "implementations.update_audit",
    "tab:overflow_audit": "implementations.overflow_audit",
    "audit:implementations": "implementations.all_implementations",
    "tab:moe": "moe.router_variants",
    "text:moe_top2": "moe.router_variants",
    "tab:finetune": "training.low_coefficient",
    "tab:fineweb_ft": "training.low_coefficient",
    "tab:fineweb_medium_ft": "training.low_coefficient",
    "tab:gpt2_diag": "training.low_coefficient",
    "tab:medium_ft": "training.low_coefficient",
    "tab:medium_long": "training.low_coefficient",
    "tab:pythia_ft": "training.low_coefficient",
    "tab:stress_diag": "training.stress",
    "tab:fineweb_noclip_stress": "training.stress",
    "tab:fineweb_update_outlier": "training.stress",
    "tab:fineweb_update_outlier_sweep": "training.stress",
    "tab:adam_state_stress": "training.stress",
    "text:fineweb_medium_2400": "training.low_coefficient",
    "text:raw_sweep_1e3": "training.stress",
    "text:paired_differences": "training.paired_differences",
    "text:reporting": "reporting.checklist",
}
ALIASES = {"fig:gradient_geometry": "text:gradient_geometry"}


def labels() -> tuple[str, ...]:
    """Labels in the order of the paper."""
    return tuple(MODULES)


def find_recipe(label: str) -> Recipe[Any]:
    """The recipe of a label, also without its "tab:" or "text:"."""
    names = {name.partition(":")[2]: name for name in MODULES}
    known = ALIASES.get(label) or names.get(label, label)
    if known not in MODULES:
        raise UnknownNameError("label", label, MODULES)
    recipes: tuple[Recipe[Any], ...] = importlib.import_module(f"zloss_paper.{MODULES[known]}").RECIPES
    return next(recipe for recipe in recipes if recipe.label == known)
