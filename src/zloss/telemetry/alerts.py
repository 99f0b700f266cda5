"""Alerts while training: a change of a number against the run's own recent past, not a level.

For each quantity the median of the last W observations is compared with the median of the W observations `lag` before
them. While an alert is active, its reference stays fixed; the alert ends once the median has returned halfway. So a change
is reported once, and the reference follows the slow drift of a healthy run. The first `warmup` observations are not used:
a learning-rate warm-up changes everything.

| kind   | a change is                                                                  | for                         |
|--------|------------------------------------------------------------------------------|-----------------------------|
| ratio  | the recent median is `ratio` times the reference                             | tails, gains, norms, ‖v‖∞   |
| fall   | the reference is `ratio` times the recent median                             | the fp16 margin             |
| factor | the recent median of a logarithm differs by log `ratio`, in either direction | the log-normalizer          |
| events | the share of recent steps with an event is larger by `ratio`                 | Φ_τ                         |

In all kinds but the last the difference must also exceed `deviations` of the reference's median absolute deviations; in
the last, three binomial standard deviations of the reference's share.

A level of the decision map that a run exceeds is a state, not an alert, and is reported once: some pretrained models
exceed two levels before their first step.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from zloss.decide.thresholds import Thresholds
from zloss.distributed import first_rank
from zloss.errors import InputError, TrainingAlertError
from zloss.optimizer.endpoints import THRESHOLDS
from zloss.telemetry.trackers import alert_trackers

Kind = Literal["ratio", "fall", "factor", "events"]


@dataclass(frozen=True)
class AlertRule:
    """What counts as a change of one quantity."""

    quantity: str
    """Name of a scalar."""
    meaning: str
    """What it is, in words."""
    ratio: float
    """See the table above."""
    deviations: float = 3.0
    """How many (normalized) median absolute deviations of the reference the difference must exceed."""
    kind: Kind = "ratio"
    threshold: float = 0.0
    """events: the gradient norm above which a step is an event."""


LOG_Z = "log_z_mean"
RULES = (
    AlertRule(LOG_Z, "the common shift of the logits (mean log Z)", 1.5, 4.0, kind="factor"),
    AlertRule("mu_abs_p99", "the tail of the common shift |μ|", 2.0),
    AlertRule("p_z_999_raw", "the tail of |log Z − log V| (raw)", 3.0),
    AlertRule("p_z_999_centered", "the tail of |log Z̃ − log V| (centered)", 2.0),
    AlertRule("gain_mean", "the gain (raw)", 1.25),
    AlertRule("gain_p99", "the tail of the gain (raw)", 2.5),
    AlertRule("gain_centered_p99", "the tail of the gain (centered)", 2.0),
    AlertRule("grad_norm_preclip", "the gradient norm before clipping", 2.5),
    AlertRule("adam_v_max", "the largest second moment of Adam", 10.0),
    AlertRule("fp16_margin", "the largest static loss scale without an fp16 overflow", 4.0, kind="fall"),
    *(
        AlertRule(f"phi_{tau:g}", f"the share of steps with a gradient norm above {tau:g}", 0.2, 0.0, "events", tau)
        for tau in THRESHOLDS
    ),
)
"""Each ratio exceeds the largest one seen in clean runs (`benchmarks/alert_rates.py`). Means over tokens are the steadiest
numbers of a healthy run: mean log Z and the mean raw gain are the first to move when a common shift grows."""
GRADIENT_NORM = "grad_norm_preclip"
"""The scalar whose events are counted."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution in its median absolute deviations."""
RUNNING = 9
"""Observations in the running median that dates a change."""
VIOLATION = "p_z_mean_raw"
OBSERVED = {rule.quantity for rule in RULES} | {"ce", VIOLATION, GRADIENT_NORM}
"""The scalars that are read."""
Rows = Sequence[Mapping[str, float]]
"""Observations, each by name."""


@dataclass(frozen=True)
class Alert:
    """A change that began at a step."""

    quantity: str
    meaning: str
    step: int
    """The step that reported it."""
    began: int
    """The first step beyond two deviations of the reference after the running median was last within them."""
    value: float
    """Median of the last observations; events: their share."""
    reference: float
    """The same of the reference."""
    ce_invisible: bool
    """Whether cross-entropy stayed within three of its deviations meanwhile."""
    kind: Kind = "ratio"

    def __str__(self) -> str:
        if self.quantity == "nonfinite":
            return f"step {self.step}: {self.meaning}."
        value, reference = f"{self.value:.4g}", f"{self.reference:.4g}"
        if self.kind == "factor":
            side = "above" if self.value > self.reference else "below"
            change = f"{value}, {abs(self.value - self.reference):.3g} nats {side} its reference {reference}"
        elif self.kind == "events":
            change = f"{value}, and was {reference}"
        else:
            times = self.value / self.reference if self.reference else math.inf
            change = f"{value}, {times:.3g} times its reference {reference}"
        hidden = " Cross-entropy stayed within its own noise: it cannot see this." if self.ce_invisible else ""
        return f"step {self.step}: {self.meaning} ({self.quantity}) is {change}, since step {self.began}.{hidden}"


class AlertMonitor:
    """Reports changes in a sequence of observations. Its state is plain numbers: `state_dict` goes into a checkpoint.

    `window`: W observations; `lag`: how far before them the reference lies; `warmup`: observations skipped at the start.
    `pulled`: the objective pulls log Z to a target; then a change of mean log Z is reported only if the mean distance to
    log V has grown.
    """

    def __init__(
        self,
        window: int = 50,
        lag: int = 100,
        warmup: int = 200,
        *,
        pulled: bool = False,
    ) -> None:
        if window < 3 or lag < window or warmup < 0:
            raise InputError(
                f"alerts need window ≥ 3, lag ≥ window and warmup ≥ 0 observations, but got {window}, {lag}, {warmup}."
            )
        self.window, self.lag, self.warmup, self.pulled = window, lag, warmup, pulled
        self.seen = 0
        self._history: deque[dict[str, float]] = deque(maxlen=window + lag)
        self._active: dict[str, float] = {}
        """Quantity → the reference of its active alert."""

    @property
    def active(self) -> tuple[str, ...]:
        """Quantities with an active alert."""
        return tuple(self._active)

    def observe(self, step: int, scalars: Mapping[str, float]) -> list[Alert]:
        """Add the numbers of one step; returns the alerts that begin with it."""
        found: list[Alert] = []
        wrong = sorted(name for name, value in scalars.items() if not math.isfinite(value))
        if not wrong:
            self._active.pop("nonfinite", None)
        elif "nonfinite" not in self._active:
            self._active["nonfinite"] = 0.0
            found = [Alert("nonfinite", f"not finite: {', '.join(wrong)}", step, step, math.nan, 0.0, False)]
        self.seen += 1
        if self.seen <= self.warmup:
            return found
        kept = {name: float(scalars[name]) for name in OBSERVED if math.isfinite(scalars.get(name, math.nan))}
        self._history.append({"step": float(step)} | kept)
        if len(self._history) < self.window + self.lag:
            return found
        rows = list(self._history)
        reference, recent = rows[: self.window], rows[self.lag :]
        alerts = (self._evaluate(step, rule, reference, recent) for rule in RULES)
        return found + [alert for alert in alerts if alert is not None]

    def _evaluate(self, step: int, rule: AlertRule, before: Rows, after: Rows) -> Alert | None:
        reference, recent = _rule_values(rule, before), _rule_values(rule, after)
        if not recent or not reference:
            return None
        typical = fmean if rule.kind == "events" else median
        now, base, spread = typical(recent), typical(reference), _deviation(reference)
        if rule.quantity in self._active:
            change, limit = _change(rule, now, self._active[rule.quantity])
            if change < limit / 2:
                del self._active[rule.quantity]
            return None
        change, limit = _change(rule, now, base)
        noise = rule.deviations * spread
        if rule.kind == "events":
            noise = 3 * math.sqrt(base * (1 - base) / len(recent))
        if change <= limit or abs(now - base) <= noise:
            return None
        if rule.quantity == LOG_Z and self.pulled:
            distances = _column(VIOLATION, before), _column(VIOLATION, after)
            if all(distances) and median(distances[1]) <= median(distances[0]):
                return None
        self._active[rule.quantity] = base
        if rule.kind == "events":
            began = next(int(row["step"]) for row in after if row.get(GRADIENT_NORM, 0.0) > rule.threshold)
        else:
            rows = [row for row in self._history if rule.quantity in row]
            steps = [int(row["step"]) for row in rows]
            began = _change_began(steps, _column(rule.quantity, rows), base, 2 * spread, rising=now > base)
        ce_before, ce_after = _column("ce", before), _column("ce", after)
        unchanged = all((ce_before, ce_after)) and (
            abs(median(ce_after) - median(ce_before)) <= 3 * _deviation(ce_before)
        )
        return Alert(rule.quantity, rule.meaning, step, began, now, base, unchanged, rule.kind)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, as JSON values."""
        return {"seen": self.seen, "history": list(self._history), "active": dict(self._active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.seen = int(state["seen"])
        self._history.clear()
        self._history.extend(dict(row) for row in state["history"])
        self._active = dict(state["active"])


OnAlert = Literal["log", "raise"] | Callable[[Alert], None]
"""What to do with an alert."""

logger = logging.getLogger("zloss")


def alert_action(on_alert: OnAlert) -> Callable[[Alert], None]:
    """The function that handles an alert. "log" and "raise" also send it to the active W&B and trackio runs."""
    if callable(on_alert):
        return on_alert
    if on_alert not in ("log", "raise"):
        raise InputError(
            f"`on_alert` is expected to be 'log', 'raise' or a function of an alert, but got {on_alert!r}."
        )

    def act(alert: Alert) -> None:
        if first_rank():  # every process sees the same numbers
            alert_trackers(f"zloss: {alert.quantity}", str(alert))
            if on_alert == "log":
                logger.warning("%s", alert)
        if on_alert == "raise":
            raise TrainingAlertError(str(alert))

    return act


def exceeded_levels(scalars: Mapping[str, float], vocab: int) -> dict[str, tuple[float, float]]:
    """Name of a scalar → (value, threshold), for each one above its threshold in the decision map."""
    limits = {"mu_abs_p99": Thresholds().shift_over_log_v * math.log(vocab), "gain_p99": Thresholds().gain_99}
    return {name: (scalars[name], limit) for name, limit in limits.items() if scalars.get(name, 0.0) > limit}


def _column(name: str, rows: Rows) -> list[float]:
    """One scalar of all observations that have it."""
    return [row[name] for row in rows if name in row]


def _rule_values(rule: AlertRule, rows: Rows) -> list[float]:
    """The values of a rule's quantity; events: 1 for a step that is an event, 0 for any other."""
    if rule.kind == "events":
        return [float(value > rule.threshold) for value in _column(GRADIENT_NORM, rows)]
    return _column(rule.quantity, rows)


def _change(rule: AlertRule, now: float, base: float) -> tuple[float, float]:
    """(size of the change from the reference, size from which on it is an alert)."""
    if rule.kind == "events":
        return now - base, rule.ratio
    if rule.kind == "factor":
        return abs(now - base), math.log(rule.ratio)
    return (base - now, (rule.ratio - 1) * now) if rule.kind == "fall" else (now - base, (rule.ratio - 1) * base)


def _change_began(steps: Sequence[int], values: Sequence[float], base: float, band: float, *, rising: bool) -> int:
    """The first step beyond `band` of the reference after the running median was last within it.

    The running median is centered, over at most 9 observations. If it was never within the band, all steps are searched.
    """
    beyond = [(value - base if rising else base - value) - band for value in values]
    reach = min(RUNNING, len(values)) // 2
    start = 0
    for place in range(len(values) - 1, -1, -1):
        if median(beyond[max(0, place - reach) : place + reach + 1]) <= 0:
            start = place + 1
            break
    return next((step for step, above in zip(steps[start:], beyond[start:], strict=True) if above > 0), steps[-1])


def _deviation(values: Sequence[float]) -> float:
    """The median absolute deviation, in units of a standard deviation."""
    middle = median(values)
    return NORMAL * median(abs(value - middle) for value in values)
