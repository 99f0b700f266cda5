"""Trackers that a run writes to: one that is asked for must be installed, in a version that was tried."""

from __future__ import annotations

import importlib.util

from zloss.errors import MissingDependencyError, require_version

LEAST = {"tensorboard": "2.19", "wandb": "0.20", "trackio": "0.10", "mlflow": "3.0"}
"""Tracker → its oldest version that is supported; of others any version is taken."""
EXTRA = "trackers"


def require_tracker(name: str) -> None:
    """An error of one sentence where a tracker is missing or too old; its name is that of its module."""
    purpose = f"The tracker {name!r}"
    if name in LEAST:
        # mlflow-skinny is the same library without its server.
        require_version(name, LEAST[name], purpose, EXTRA, also="mlflow-skinny" if name == "mlflow" else None)
    elif importlib.util.find_spec(name) is None:
        raise MissingDependencyError(name, purpose, EXTRA)
