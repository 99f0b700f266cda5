"""Alerts while training: a change of a number against the run's own recent past, not a level.

Per quantity, the median of the last W observations is compared with the median of the W observations that lie `lag`
before them, by the rules of `zloss.telemetry.alert_rules`. While an alert is on, its reference stays where it was; the
alert ends once the median has come back half of the way. So one change is reported once, and a slow development of a
healthy run moves the reference along.

The first `warmup` observations are not used: a learning-rate warm-up changes everything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from zloss.errors import InputError
from zloss.telemetry.alert_rules import GRADIENT_NORM, LOG_Z, RULES, Alert, AlertRule, as_dict

__all__ = ["RULES", "Alert", "AlertMonitor", "AlertRule", "as_dict"]

NORMAL = 1.4826
"""Standard deviation of a normal distribution in its median absolute deviations."""
RUNNING = 9
"""Observations of the running median that dates a change."""
VIOLATION = "p_z_mean_raw"
Rows = Sequence[Mapping[str, float]]
"""Observations, each by name."""


class AlertMonitor:
    """Observations in, changes out. Its whole state is plain numbers: `state_dict` goes into a checkpoint.

    `window`: W observations; `lag`: how far before them the reference lies; `warmup`: observations left out first.
    `pulled`: the objective pulls log Z to a target; then a change of mean log Z is one only where the mean distance to
    log V has grown.
    """

    def __init__(
        self,
        window: int = 50,
        lag: int = 100,
        warmup: int = 200,
        rules: tuple[AlertRule, ...] = RULES,
        *,
        pulled: bool = False,
    ) -> None:
        if window < 3 or lag < window or warmup < 0:
            raise InputError(
                f"alerts need window ≥ 3, lag ≥ window and warmup ≥ 0 observations, but got {window}, {lag}, {warmup}."
            )
        self.window, self.lag, self.warmup, self.rules, self.pulled = window, lag, warmup, rules, pulled
        self.seen = 0
        self._names = {rule.quantity for rule in rules} | {"ce", VIOLATION, GRADIENT_NORM}
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
        kept = {name: float(scalars[name]) for name in self._names if math.isfinite(scalars.get(name, math.nan))}
        self._history.append({"step": float(step)} | kept)
        if len(self._history) < self.window + self.lag:
            return found
        rows = list(self._history)
        reference, recent = rows[: self.window], rows[self.lag :]
        judged = (self._judge(step, rule, reference, recent) for rule in self.rules)
        return found + [alert for alert in judged if alert is not None]

    def _nonfinite(self, step: int, scalars: Mapping[str, float]) -> list[Alert]:
        wrong = sorted(name for name, value in scalars.items() if not math.isfinite(value))
        if not wrong:
            self._active.pop("nonfinite", None)
            return []
        if "nonfinite" in self._active:
            return []
        self._active["nonfinite"] = 0.0
        return [Alert("nonfinite", f"not finite: {', '.join(wrong)}", step, step, math.nan, 0.0, False)]

    def _judge(self, step: int, rule: AlertRule, before: Rows, after: Rows) -> Alert | None:
        reference, recent = rule_values(rule, before), rule_values(rule, after)
        if not recent or not reference:
            return None
        now, base = middle_of(rule, recent), middle_of(rule, reference)
        if rule.quantity in self._active:
            if has_come_back(rule, now, self._active[rule.quantity]):
                del self._active[rule.quantity]
            return None
        if not is_large(rule, now, base, len(recent)):
            return None
        spread = deviation(reference)
        if abs(now - base) <= rule.deviations * spread:
            return None
        if (
            rule.quantity == LOG_Z
            and self.pulled
            and not has_grown(column(VIOLATION, before), column(VIOLATION, after))
        ):
            return None
        self._active[rule.quantity] = base
        if rule.kind == "events":
            began = next(int(row["step"]) for row in after if row.get(GRADIENT_NORM, 0.0) > rule.threshold)
        else:
            rows = [row for row in self._history if rule.quantity in row]
            steps = [int(row["step"]) for row in rows]
            began = change_began(steps, column(rule.quantity, rows), base, 2 * spread, rising=now > base)
        still = is_still(column("ce", before), column("ce", after))
        return Alert(rule.quantity, rule.meaning, step, began, now, base, still, rule.kind)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as JSON values."""
        return {"seen": self.seen, "history": list(self._history), "active": dict(self._active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.seen = int(state["seen"])
        self._history.clear()
        self._history.extend(dict(row) for row in state["history"])
        self._active = dict(state["active"])


def column(name: str, rows: Rows) -> list[float]:
    """One number of all observations that have it."""
    return [row[name] for row in rows if name in row]


def rule_values(rule: AlertRule, rows: Rows) -> list[float]:
    """What a rule takes the median of; events: 1 for a step that is one, 0 for another."""
    if rule.kind == "events":
        return [float(value > rule.threshold) for value in column(GRADIENT_NORM, rows)]
    return column(rule.quantity, rows)


def middle_of(rule: AlertRule, values: Sequence[float]) -> float:
    """The median; events: the share."""
    return fmean(values) if rule.kind == "events" else median(values)


def has_grown(reference: Sequence[float], recent: Sequence[float]) -> bool:
    """Whether the median has; True where it is not known."""
    return not recent or not reference or median(recent) > median(reference)


def is_still(reference: Sequence[float], recent: Sequence[float]) -> bool:
    """Whether the median stayed within three deviations of the reference; False where it is not known."""
    if not recent or not reference:
        return False
    return abs(median(recent) - median(reference)) <= 3 * deviation(reference)


def is_large(rule: AlertRule, now: float, base: float, count: int) -> bool:
    """Whether `now` differs from the reference by the rule's ratio; events: by its share, and by their noise."""
    if rule.kind == "events":
        return now - base > max(rule.ratio, 3 * math.sqrt(base * (1 - base) / count))
    if rule.kind == "factor":
        return abs(now - base) > math.log(rule.ratio)
    return now * rule.ratio < base if rule.kind == "fall" else now > rule.ratio * base


def has_come_back(rule: AlertRule, now: float, base: float) -> bool:
    """Whether less than half of what made a change is left."""
    if rule.kind == "events":
        return now - base < rule.ratio / 2
    if rule.kind == "factor":
        return abs(now - base) < math.log(rule.ratio) / 2
    half = (1 + rule.ratio) / 2
    return now * half > base if rule.kind == "fall" else now < base * half


def change_began(steps: Sequence[int], values: Sequence[float], base: float, band: float, *, rising: bool) -> int:
    """The first step beyond `band` of the reference after the running median was last within it.

    The running median is over at most 9 observations, centered; it is the first step where it was never within.
    """
    beyond = [(value - base if rising else base - value) - band for value in values]
    reach = min(RUNNING, len(values)) // 2
    start = 0
    for place in range(len(values) - 1, -1, -1):
        if median(beyond[max(0, place - reach) : place + reach + 1]) <= 0:
            start = place + 1
            break
    return next((step for step, above in zip(steps[start:], beyond[start:], strict=True) if above > 0), steps[-1])


def deviation(values: Sequence[float]) -> float:
    """The median absolute deviation, in units of a standard deviation."""
    middle = median(values)
    return NORMAL * median(abs(value - middle) for value in values)
