"""Stress settings of the paper by name: other defaults for coefficient, learning rate and clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

StressName = Literal["high-coef", "unclipped", "update-outlier", "high-lr"]
EFFECTIVELY_UNCLIPPED = 1e8
"""A clipping threshold that no gradient norm of these runs reaches."""


@dataclass(frozen=True)
class Stress:
    """One setting."""

    meaning: str
    """What it is, with its table in the paper."""
    changes: dict[str, Any]
    """Fields of `TrainConfig` with their values."""
    coef: float | None = None
    """λ of the methods; None: as without the setting."""


STRESSES: dict[StressName, Stress] = {
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
