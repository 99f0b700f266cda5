"""Levels of the decision map that a run is above: a state, reported once, not an alert.

Some pretrained models are above two of them before their first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from zloss.decide.thresholds import Thresholds


def exceeded_levels(
    scalars: Mapping[str, float], vocab: int, thresholds: Thresholds | None = None
) -> dict[str, tuple[float, float]]:
    """Name of a scalar → (its value, the threshold), for every one that exceeds its threshold."""
    chosen = Thresholds() if thresholds is None else thresholds
    limits = {"mu_abs_p99": chosen.shift_over_log_v * math.log(vocab), "gain_p99": chosen.gain_99}
    return {name: (scalars[name], limit) for name, limit in limits.items() if scalars.get(name, 0.0) > limit}
