"""Trackers of accelerate (tensorboard, wandb, ...): which are usable, and the scalars that a step gives them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

from zloss.errors import MissingDependencyError, UnknownNameError
from zloss.results.step_record import StepRecord
from zloss.telemetry.trackers import require_tracker

DEFAULT = "tensorboard"
SCALARS = ("loss", "cross_entropy", "auxiliary", "grad_norm", "grad_inf", "param_norm", "lr")
"""Numbers of a step record that trackers get, beside its telemetry."""


def usable_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """The named trackers without `none`; the default one is left out without a message where it is not installed."""
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    except ImportError as error:
        raise MissingDependencyError("accelerate", "Training", "train") from error
    known = {str(kind): kind for kind in LOGGER_TYPE_TO_CLASS}
    wanted = [name for name in names if name != "none"]
    for name in wanted:
        if name not in known:
            raise UnknownNameError("tracker", name, [*known, "none"])
    if tuple(names) == (DEFAULT,) and importlib.util.find_spec("tensorboard") is None:
        wanted.remove(DEFAULT)
    for name in wanted:
        require_tracker(name)  # accelerate leaves out what is not installed without a word
    return tuple(wanted)


def tracked(record: StepRecord) -> dict[str, float]:
    """The scalars of a step for a tracker; what is not finite is left out."""
    values: dict[str, float | None] = {name: getattr(record, name) for name in SCALARS} | record.telemetry
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
