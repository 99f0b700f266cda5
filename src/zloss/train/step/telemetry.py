"""Telemetry of a step for its record: P_Z, A_p and μ tails over the step's tokens, from a window of one step.

P_Z and A_p are in the coordinate that the method deploys, and P_Z is taken against c = log V whatever the target of the
objective is. The numbers reach the host in one transfer per step.
"""

from __future__ import annotations

import math

from zloss.objectives import Objective
from zloss.telemetry.window import StepWindow

KEYS = {"p_z_999": "p_z_999", "a_p_99": "a_p_99", "mu_abs_99": "mu_abs_p99"}
"""Key in `StepRecord.telemetry` → name of the scalar of the window."""


def step_window(objective: Objective, *, deployed: bool = False) -> StepWindow:
    """A window of one step, over the tokens of all ranks.

    `deployed`: the statistics are of logits that are already centered (the paper's path), so log Z needs no shift.
    """
    return StepWindow(1, "raw" if deployed else objective.coordinate, across_ranks=True)


def step_tails(window: StepWindow) -> dict[str, float | None]:
    """p99.9 |log Z − log V|, p99 A_p and p99 |μ| of the last step's valid tokens; None where it does not exist."""
    found = window.last_step()
    values = {key: found.get(name) for key, name in KEYS.items()}
    return {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}
