"""Stress settings of the paper by name: what they change in a run, and why one would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zloss.errors import UnknownNameError

EFFECTIVELY_UNCLIPPED = 1e8


@dataclass(frozen=True)
class Stress:
    """Fields of TrainConfig, and of the grid for the coefficient, that a setting replaces."""

    meaning: str
    changes: dict[str, Any]
    coef: float | None = None


STRESSES = {
    "high-coef": Stress("a tenfold coefficient under the usual clipping (tab:stress_diag)", {}, coef=1e-3),
    "unclipped": Stress(
        "effectively no clipping, four times the learning rate (tab:fineweb_noclip_stress)",
        {"clip": EFFECTIVELY_UNCLIPPED, "lr": 2e-4},
        coef=1e-3,
    ),
    "update-outlier": Stress(
        "effectively no clipping, sixteen times the learning rate (tab:fineweb_update_outlier)",
        {"clip": EFFECTIVELY_UNCLIPPED, "lr": 8e-4},
        coef=3e-3,
    ),
    "high-lr": Stress("the learning rate of the update-outlier setting, clipped at 1", {"lr": 8e-4}),
}


def find_stress(name: str) -> Stress:
    """The setting of that name."""
    if name not in STRESSES:
        raise UnknownNameError("stress setting", name, STRESSES)
    return STRESSES[name]
