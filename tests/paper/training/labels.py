"""The recipes that rest on matched training runs."""

from __future__ import annotations

TABLES = (
    "tab:finetune",
    "tab:fineweb_ft",
    "tab:fineweb_medium_ft",
    "tab:gpt2_diag",
    "tab:medium_ft",
    "tab:medium_long",
    "tab:pythia_ft",
    "tab:stress_diag",
    "tab:fineweb_noclip_stress",
    "tab:fineweb_update_outlier",
    "tab:fineweb_update_outlier_sweep",
    "tab:adam_state_stress",
)
"""Printed by the paper."""
DESCRIBED = ("text:fineweb_medium_2400", "text:raw_sweep_1e3")
TRAINING = (*TABLES, *DESCRIBED, "text:paired_differences")
