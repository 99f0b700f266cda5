"""Trackers by name, through accelerate."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from zloss.errors import MissingDependencyError, UnknownNameError

DEFAULT = "tensorboard"


def usable_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """The named trackers, `none` taken out; the default one is left out quietly where it is not installed."""
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    except ImportError as error:
        raise MissingDependencyError("accelerate", "Training", "train") from error
    known = {str(kind): kind for kind in LOGGER_TYPE_TO_CLASS}
    wanted = [name for name in names if name != "none"]
    for name in wanted:
        if name not in known:
            raise UnknownNameError("tracker", name, [*known, "none"])
    if DEFAULT in wanted and importlib.util.find_spec("tensorboard") is None:
        if tuple(names) != (DEFAULT,):
            raise MissingDependencyError("tensorboard", "That tracker", "train")
        wanted.remove(DEFAULT)
    return tuple(wanted)
