"""What counts as a change of one number of a run, and the record of a change.

| kind   | a change is                                                                  | for                         |
|--------|------------------------------------------------------------------------------|-----------------------------|
| ratio  | the recent median is `ratio` times the reference                             | tails, gains, norms, ‖v‖∞   |
| fall   | the reference is `ratio` times the recent median                             | the fp16 margin             |
| factor | the recent median of a logarithm differs by log `ratio`, in either direction | the log-normalizer          |
| events | the share of recent steps with an event is larger by `ratio`                 | Φ_τ                         |

In all kinds but the last the difference must also exceed `deviations` of the reference's median absolute deviations, and in
the last three binomial standard deviations of the reference's share.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from zloss.optimizer.endpoints import THRESHOLDS

Kind = Literal["ratio", "fall", "factor", "events"]


@dataclass(frozen=True)
class AlertRule:
    """What counts as a change of one quantity."""

    quantity: str
    """Name of a scalar."""
    meaning: str
    """What changed, in words."""
    ratio: float
    """See the table above."""
    deviations: float = 3.0
    """By how many (normalised) median absolute deviations of the reference it must differ."""
    kind: Kind = "ratio"
    threshold: float = 0.0
    """events: the gradient norm above which a step is one."""


LOG_Z = "log_z_mean"
SHIFT = AlertRule(LOG_Z, "the common shift of the logits (mean log Z)", 1.5, 4.0, kind="factor")
RULES = (
    SHIFT,
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
"""Each ratio lies above the largest that clean runs showed (`benchmarks/alert_rates.py`). Means over tokens are the steadiest
numbers of a healthy run: mean log Z and the mean raw gain are the first to move when a common shift grows."""
GRADIENT_NORM = "grad_norm_preclip"
"""The number of a step from which events are counted."""


@dataclass(frozen=True)
class Alert:
    """A change that began at a step."""

    quantity: str
    meaning: str
    step: int
    """The step at which it was reported."""
    began: int
    """The first step beyond two deviations of the reference after the running median was last within them."""
    value: float
    """Median of the last observations; events: their share."""
    reference: float
    """The same of the reference."""
    ce_invisible: bool
    """Whether cross-entropy stayed within three of its own deviations meanwhile."""
    kind: Kind = "ratio"

    def __str__(self) -> str:
        if self.quantity == "nonfinite":
            return f"step {self.step}: {self.meaning}."
        hidden = " Cross-entropy stayed within its own noise: it cannot see this." if self.ce_invisible else ""
        return f"step {self.step}: {self.meaning} ({self.quantity}) {self._change()}, since step {self.began}.{hidden}"

    def _change(self) -> str:
        value, reference = f"{self.value:.4g}", f"{self.reference:.4g}"
        if self.kind == "factor":
            side = "above" if self.value > self.reference else "below"
            return f"is {value}, {abs(self.value - self.reference):.3g} nats {side} its reference {reference}"
        if self.kind == "events":
            return f"is {value}, and was {reference}"
        times = self.value / self.reference if self.reference else float("inf")
        return f"is {value}, {times:.3g} times its reference {reference}"


def as_dict(alert: Alert) -> dict[str, Any]:
    """An alert as JSON values."""
    return asdict(alert) | {"sentence": str(alert)}
