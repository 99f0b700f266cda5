"""The objective that a run trains with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from zloss.objectives import Objective, make_objective
from zloss.results.train_config import TrainConfig


def run_objective(config: TrainConfig) -> Objective:
    """The registered objective of the run's method, with its coefficient, target and β."""
    made: Any = make_objective(config.method, config.coef)
    own = {field.name for field in fields(made)}
    changes: dict[str, Any] = {}
    if config.target is not None:
        changes |= {name: config.target for name in ("target", "relative_target") if name in own}
    if "beta" in own:
        changes["beta"] = config.gain_beta
    objective: Objective = replace(made, **changes) if changes else made
    return objective
