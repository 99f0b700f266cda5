"""What `apply` was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.head.options import Backend
from zloss.objectives import Objective
from zloss.statistics import Statistics


@dataclass(frozen=True)
class Settings:
    """The objective and the options of every training call."""

    objective: Objective
    label_smoothing: float = 0.0
    statistics: Statistics = "full"
    backend: Backend = "auto"
