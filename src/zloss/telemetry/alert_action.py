"""What is done with an alert: a warning in the log, an error, or a call of the user's function."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from zloss.errors import InputError, TrainingAlertError
from zloss.ranks.process_group import first_rank
from zloss.telemetry.alert_rules import Alert

OnAlert = Literal["log", "raise"] | Callable[[Alert], None]
"""`on_alert`: what to do with an alert."""

logger = logging.getLogger("zloss")


def alert_action(on_alert: OnAlert) -> Callable[[Alert], None]:
    """The function that an alert is given to."""
    if callable(on_alert):
        return on_alert
    if on_alert == "log":
        return _warn
    if on_alert == "raise":
        return _raise
    raise InputError(f"`on_alert` is expected to be 'log', 'raise' or a function of an alert, but got {on_alert!r}.")


def _warn(alert: Alert) -> None:
    if first_rank():  # every process sees the same numbers
        logger.warning("%s", alert)


def _raise(alert: Alert) -> None:
    raise TrainingAlertError(str(alert))
