"""Alerts while training: a change of a tail against the run's own recent past, not a level.

Per quantity, the median of the last W observations is compared with the median of the W observations that lie `lag`
before them. It is a change where it exceeds the reference by a ratio *and* by a number of the reference's median absolute
deviations. While an alert is on, its reference stays where it was; the alert ends once the median has come back half of
the way. So one change is reported once, and a slow development of a healthy run moves the reference along.

The first `warmup` observations are not used: a learning-rate warm-up changes everything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from zloss.errors import InputError

NORMAL = 1.4826
"""Standard deviation of a normal distribution in its median absolute deviations."""


@dataclass(frozen=True)
class AlertRule:
    """What counts as a change of one quantity."""

    quantity: str
    """Name of a scalar."""
    meaning: str
    """What grew, in words."""
    ratio: float
    """How many times its reference the median must be."""
    deviations: float = 3.0
    """By how many (normalised) median absolute deviations of the reference it must exceed it."""


RULES = (
    AlertRule("mu_abs_p99", "the common shift of the logits", 1.5),
    AlertRule("p_z_999_raw", "the tail of |log Z − log V| (raw)", 2.0),
    AlertRule("p_z_999_centered", "the tail of |log Z̃ − log V| (centered)", 1.75),
    AlertRule("gain_p99", "the tail of the gain (raw)", 1.3),
    AlertRule("gain_centered_p99", "the tail of the gain (centered)", 1.4),
    AlertRule("grad_norm_preclip", "the gradient norm before clipping", 2.5),
)
"""Each ratio lies above the largest that clean runs showed (docs/integrations.md has them): the raw gain is the steadiest
quantity of a healthy run and the first to move when a common shift grows."""


@dataclass(frozen=True)
class Alert:
    """A change that began at a step."""

    quantity: str
    meaning: str
    step: int
    """The step at which it was reported."""
    began: int
    """The first step from which on every observation was above the limit."""
    value: float
    """Median of the last observations."""
    reference: float
    """Median of the reference."""
    ce_invisible: bool
    """Whether cross-entropy stayed within three of its own deviations meanwhile."""

    def __str__(self) -> str:
        hidden = " Cross-entropy stayed within its own noise: it cannot see this." if self.ce_invisible else ""
        if self.quantity == "nonfinite":
            return f"step {self.step}: {self.meaning}."
        return (
            f"step {self.step}: {self.meaning} ({self.quantity}) is {self.value:.4g}, {self.value / self.reference:.3g} times "
            f"its reference {self.reference:.4g}, since step {self.began}.{hidden}"
        )


class AlertMonitor:
    """Observations in, changes out. Its whole state is plain numbers: `state_dict` goes into a checkpoint.

    `window`: W observations; `lag`: how far before them the reference lies; `warmup`: observations left out first.
    """

    def __init__(
        self, window: int = 50, lag: int = 200, warmup: int = 200, rules: tuple[AlertRule, ...] = RULES
    ) -> None:
        if window < 3 or lag < window or warmup < 0:
            raise InputError(
                f"alerts need window ≥ 3, lag ≥ window and warmup ≥ 0 observations, but got {window}, {lag}, {warmup}."
            )
        self.window, self.lag, self.warmup, self.rules = window, lag, warmup, rules
        self.seen = 0
        self._history: deque[dict[str, float]] = deque(maxlen=window + lag)
        self._active: dict[str, float] = {}
        """Quantity → the reference that its alert is held against."""

    @property
    def active(self) -> tuple[str, ...]:
        """Quantities whose alert is on."""
        return tuple(self._active)

    def observe(self, step: int, scalars: Mapping[str, float]) -> list[Alert]:
        """One step's numbers; returns the alerts that begin with it."""
        found = self._nonfinite(step, scalars)
        self.seen += 1
        if self.seen <= self.warmup:
            return found
        names = {rule.quantity for rule in self.rules} | {"ce"}
        kept = {name: float(scalars[name]) for name in names if name in scalars and math.isfinite(scalars[name])}
        self._history.append({"step": float(step)} | kept)
        if len(self._history) < self.window + self.lag:
            return found
        return found + [alert for rule in self.rules if (alert := self._judge(step, rule)) is not None]

    def _nonfinite(self, step: int, scalars: Mapping[str, float]) -> list[Alert]:
        wrong = sorted(name for name, value in scalars.items() if not math.isfinite(value))
        if not wrong:
            self._active.pop("nonfinite", None)
            return []
        if "nonfinite" in self._active:
            return []
        self._active["nonfinite"] = 0.0
        return [Alert("nonfinite", f"not finite: {', '.join(wrong)}", step, step, math.nan, 0.0, False)]

    def _judge(self, step: int, rule: AlertRule) -> Alert | None:
        recent = self._values(rule.quantity, self.lag, None)
        reference = self._values(rule.quantity, 0, self.window)
        if not recent or not reference:
            return None
        now, base = median(recent), median(reference)
        if rule.quantity in self._active:
            base = self._active[rule.quantity]
            if now < base * (1 + rule.ratio) / 2:
                del self._active[rule.quantity]
            return None
        limit = max(rule.ratio * base, base + rule.deviations * deviation(reference))
        if not now > limit:
            return None
        self._active[rule.quantity] = base
        return Alert(rule.quantity, rule.meaning, step, self._began(rule, limit), now, base, self._ce_is_still())

    def _values(self, name: str, start: int, stop: int | None) -> list[float]:
        return [row[name] for row in list(self._history)[start:stop] if name in row]

    def _began(self, rule: AlertRule, limit: float) -> int:
        began = int(self._history[-1]["step"])
        for row in reversed(self._history):
            if row.get(rule.quantity, math.inf) <= limit:
                break
            began = int(row["step"])
        return began

    def _ce_is_still(self) -> bool:
        recent, reference = self._values("ce", self.lag, None), self._values("ce", 0, self.window)
        if not recent or not reference:
            return False
        return abs(median(recent) - median(reference)) <= 3 * deviation(reference)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as JSON values."""
        return {"seen": self.seen, "history": list(self._history), "active": dict(self._active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.seen = int(state["seen"])
        self._history.clear()
        self._history.extend(dict(row) for row in state["history"])
        self._active = dict(state["active"])


def deviation(values: list[float]) -> float:
    """The median absolute deviation, in units of a standard deviation."""
    middle = median(values)
    return NORMAL * median(abs(value - middle) for value in values)


def as_dict(alert: Alert) -> dict[str, Any]:
    """An alert as JSON values."""
    return asdict(alert) | {"sentence": str(alert)}
