"""What goes to trackers: which scalars of a window, under which names; alerts; which tracker versions are supported."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Collection
from typing import Literal

from zloss.errors import InputError, MissingDependencyError, UnknownNameError, require_version
from zloss.results.quantities import DEPLOYED, SCALARS

PREFIX = "zloss/"
"""Prefix of the names that trackers show."""
MAIN = (
    "ce",
    "z",
    "log_z_p999",
    "mu_abs_p99",
    "gain_p99",
    "gain_centered_p99",
    "p_z_999_raw",
    "p_z_999_centered",
    "entropy",
    "grad_norm_preclip",
)
"""What people plot: the two parts of the loss, one tail of each quantity, and the gradient norm."""
KNOWN = (
    *(name for names in SCALARS.values() for name in names),
    *DEPLOYED,
    *("z", "tokens", "grad_norm_preclip", "grad_norm_preclip_max", "clip_rate", "window_steps", "router_z"),
    *("coef", "z_unscaled"),
)
"""Every name, without the prefix."""

Scalars = Literal["all", "main"] | Collection[str]
"""All of them, the ten of `MAIN`, or names, with or without the prefix."""


def chosen_names(scalars: Scalars) -> frozenset[str]:
    """The names to log, without the prefix; an unknown name is an error."""
    if scalars == "all" or scalars == "main":
        return frozenset(KNOWN if scalars == "all" else MAIN)
    if (
        isinstance(scalars, str)
        or not isinstance(scalars, Collection)
        or not all(isinstance(name, str) for name in scalars)
    ):
        raise InputError(
            f'`scalars` is expected to be "all", "main" or a list of names such as ["ce", "z"], but got {scalars!r}.'
        )
    names = [name.removeprefix(PREFIX) for name in scalars]
    for name in names:
        if name not in KNOWN:
            raise UnknownNameError("scalar", name, KNOWN)
    return frozenset(names)


def for_trackers(numbers: dict[str, float], names: Collection[str] = KNOWN) -> dict[str, float]:
    """The finite numbers to log, under the names that trackers show."""
    return {f"{PREFIX}{name}": value for name, value in numbers.items() if name in names and math.isfinite(value)}


def alert_trackers(title: str, text: str) -> None:
    """Send a warning to the W&B run and the trackio run that are active in this process, if any.

    A tracker that was never imported has no run. Trackio has had alerts since 0.19 or earlier.
    """
    wandb, trackio = sys.modules.get("wandb"), sys.modules.get("trackio")
    # A folder ./wandb of an earlier run is imported as an empty package where W&B is not installed.
    if (run := getattr(wandb, "run", None)) is not None:
        run.alert(title=title, text=text, level="WARN")
    if trackio is not None and hasattr(trackio, "alert") and trackio.context_vars.current_run.get() is not None:
        trackio.alert(title=title, text=text)


LEAST = {"tensorboard": "2.19", "wandb": "0.20", "trackio": "0.10", "mlflow": "3.0"}
"""Tracker → its oldest supported version; for other trackers, any version is accepted."""
EXTRA = "trackers"


def require_tracker(name: str) -> None:
    """Raise an error if a tracker is missing or too old; `name` is the name of its module."""
    purpose = f"The tracker {name!r}"
    if name in LEAST:
        # mlflow-skinny is the same library without the server.
        require_version(name, LEAST[name], purpose, EXTRA, also="mlflow-skinny" if name == "mlflow" else None)
    elif importlib.util.find_spec(name) is None:
        raise MissingDependencyError(name, purpose, EXTRA)
