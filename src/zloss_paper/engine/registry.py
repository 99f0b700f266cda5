"""All recipes by label; a recipe's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zloss.errors import UnknownNameError

if TYPE_CHECKING:
    from zloss_paper.engine.recipe import Recipe

MODULES = {
    "tab:pretrained": "heads.pretrained",
    "tab:fineweb_pretrained": "heads.fineweb_pretrained",
    "tab:spectral_audit": "heads.spectral_audit",
    "text:gradient_geometry": "heads.gradient_geometry",
    "text:tied_paths": "heads.tied_paths",
    "tab:router": "moe.router_table",
    "tab:source_audit": "implementations.source_audit",
    "text:source_audit_fineweb": "implementations.source_audit_fineweb",
    "text:source_audit_medium": "implementations.source_audit_medium",
    "text:pytorch_backward_audit": "implementations.pytorch_backward_audit",
    "tab:triton_fused": "implementations.triton_fused",
    "text:fused_audit_medium": "implementations.fused_audit_medium",
    "tab:update_audit": "implementations.update_audit",
    "text:update_audit_fp16": "implementations.update_audit_fp16",
    "tab:overflow_audit": "implementations.overflow_audit",
    "audit:implementations": "implementations.all_implementations",
    "tab:moe": "moe.top4",
    "text:moe_top2": "moe.top2",
    "tab:finetune": "training.recipes.finetune",
    "tab:fineweb_ft": "training.recipes.fineweb_ft",
    "tab:fineweb_medium_ft": "training.recipes.fineweb_medium_ft",
    "tab:gpt2_diag": "training.recipes.gpt2_diag",
    "tab:medium_ft": "training.recipes.medium_ft",
    "tab:medium_long": "training.recipes.medium_long",
    "tab:pythia_ft": "training.recipes.pythia_ft",
    "tab:stress_diag": "training.recipes.stress_diag",
    "tab:fineweb_noclip_stress": "training.recipes.fineweb_noclip_stress",
    "tab:fineweb_update_outlier": "training.recipes.fineweb_update_outlier",
    "tab:fineweb_update_outlier_sweep": "training.recipes.fineweb_update_outlier_sweep",
    "tab:adam_state_stress": "training.recipes.adam_state_stress",
    "text:fineweb_medium_2400": "training.recipes.fineweb_medium_2400",
    "text:raw_sweep_1e3": "training.recipes.raw_sweep_1e3",
    "text:paired_differences": "training.recipes.paired_differences",
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
    recipe: Recipe[Any] = importlib.import_module(f"zloss_paper.{MODULES[known]}").RECIPE
    return recipe
