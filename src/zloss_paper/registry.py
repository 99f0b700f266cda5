"""All recipes by label; a recipe's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zloss.errors import UnknownNameError

if TYPE_CHECKING:
    from zloss_paper.recipe import Recipe

MODULES = {
    "tab:pretrained": "pretrained",
    "tab:fineweb_pretrained": "fineweb_pretrained",
    "tab:spectral_audit": "spectral_audit",
    "text:gradient_geometry": "gradient_geometry",
    "text:tied_paths": "tied_paths",
    "tab:router": "router_projection",
    "tab:source_audit": "source_audit",
    "text:source_audit_fineweb": "source_audit_fineweb",
    "text:source_audit_medium": "source_audit_medium",
    "text:pytorch_backward_audit": "pytorch_backward_audit",
    "tab:triton_fused": "triton_fused",
    "text:fused_audit_medium": "fused_audit_medium",
    "tab:update_audit": "update_audit",
    "text:update_audit_fp16": "update_audit_fp16",
    "tab:overflow_audit": "overflow_audit",
    "audit:implementations": "implementations",
    "tab:moe": "moe",
    "text:moe_top2": "moe_top2",
    "tab:finetune": "finetune",
    "tab:fineweb_ft": "fineweb_ft",
    "tab:fineweb_medium_ft": "fineweb_medium_ft",
    "tab:gpt2_diag": "gpt2_diag",
    "tab:medium_ft": "medium_ft",
    "tab:medium_long": "medium_long",
    "tab:pythia_ft": "pythia_ft",
    "tab:stress_diag": "stress_diag",
    "tab:fineweb_noclip_stress": "fineweb_noclip_stress",
    "tab:fineweb_update_outlier": "fineweb_update_outlier",
    "tab:fineweb_update_outlier_sweep": "fineweb_update_outlier_sweep",
    "tab:adam_state_stress": "adam_state_stress",
    "text:fineweb_medium_2400": "fineweb_medium_2400",
    "text:raw_sweep_1e3": "raw_sweep_1e3",
    "text:paired_differences": "paired_differences",
    "text:reporting": "reporting",
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
