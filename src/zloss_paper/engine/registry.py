"""All recipes by label; the module of a recipe is imported when it is requested."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zloss.errors import UnknownNameError

if TYPE_CHECKING:
    from zloss_paper.engine.recipe import Recipe

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
