"""The endpoints of a run's optimizer steps: the keys of metrics.json that are taken from steps.jsonl (paper app:endpoints).

Norms are over all trained parameters as one vector. Suffixes: `_p99` and `_p999` are quantiles over the steps with a finite
value, interpolated linearly between order statistics, and `_max` is their maximum. Rates are fractions between 0 and 1.
A value is None where no step has a finite one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from zloss.errors import InputError
from zloss.results.record import NATS, NOT_NEGATIVE, SHARE, from_plain

PHI = "phi_"
"""Beginning of the keys of the event rates Φ_τ; the threshold τ follows."""


@dataclass(frozen=True, kw_only=True)
class StepEndpoints:
    """What the steps of one run amount to."""

    steps: int = field(metadata=NOT_NEGATIVE)
    """Optimizer steps taken, those with a skipped update included."""
    grad_norm_p99: float | None = field(metadata=NOT_NEGATIVE)
    """G_99: p99 of ‖g‖₂ before clipping."""
    grad_norm_p999: float | None = field(metadata=NOT_NEGATIVE)
    """p99.9 of ‖g‖₂ before clipping."""
    grad_norm_max: float | None = field(metadata=NOT_NEGATIVE)
    """Largest ‖g‖₂ before clipping."""
    grad_inf_p99: float | None = field(metadata=NOT_NEGATIVE)
    """H_99: p99 of ‖g‖∞ before clipping."""
    grad_inf_p999: float | None = field(metadata=NOT_NEGATIVE)
    """p99.9 of ‖g‖∞ before clipping."""
    grad_inf_max: float | None = field(metadata=NOT_NEGATIVE)
    """Largest ‖g‖∞ before clipping."""
    grad_param_ratio_p99: float | None = field(metadata=NOT_NEGATIVE)
    """ρ_99: p99 of ‖g‖₂/‖θ‖₂ before clipping, θ where g was taken."""
    grad_param_ratio_p999: float | None = field(metadata=NOT_NEGATIVE)
    """p99.9 of ‖g‖₂/‖θ‖₂ before clipping."""
    grad_param_ratio_max: float | None = field(metadata=NOT_NEGATIVE)
    """Largest ‖g‖₂/‖θ‖₂ before clipping."""
    postclip_norm_p99: float | None = field(metadata=NOT_NEGATIVE)
    """p99 of ‖g‖₂ after clipping, as the optimizer was given it."""
    postclip_norm_p999: float | None = field(metadata=NOT_NEGATIVE)
    """p99.9 of ‖g‖₂ after clipping."""
    postclip_norm_max: float | None = field(metadata=NOT_NEGATIVE)
    """Largest ‖g‖₂ after clipping."""
    postclip_inf_p99: float | None = field(metadata=NOT_NEGATIVE)
    """p99 of ‖g‖∞ after clipping."""
    postclip_inf_p999: float | None = field(metadata=NOT_NEGATIVE)
    """p99.9 of ‖g‖∞ after clipping."""
    postclip_inf_max: float | None = field(metadata=NOT_NEGATIVE)
    """Largest ‖g‖∞ after clipping."""
    postclip_param_ratio_p99: float | None = field(metadata=NOT_NEGATIVE)
    """p99 of ‖g‖₂/‖θ‖₂ after clipping."""
    postclip_param_ratio_p999: float | None = field(metadata=NOT_NEGATIVE)
    """p99.9 of ‖g‖₂/‖θ‖₂ after clipping."""
    postclip_param_ratio_max: float | None = field(metadata=NOT_NEGATIVE)
    """Largest ‖g‖₂/‖θ‖₂ after clipping."""
    clip_rate: float | None = field(metadata=SHARE)
    """Fraction of all steps with ‖g‖₂ > clip or a nonfinite gradient; None without a clipping threshold."""
    phi: dict[str, float | None] = field(default_factory=dict, metadata=SHARE)
    """Φ_τ by its key (`phi_10` for τ = 10): fraction of all steps with ‖g‖₂ > τ before clipping or a nonfinite gradient.

    The thresholds are a setting of the run, so these keys are open; in the file they stand beside the others.
    """
    nonfinite_gradient: float | None = field(metadata=SHARE)
    """Fraction of steps whose gradient holds a NaN or an infinity."""
    nonfinite_gradient_nan: float | None = field(metadata=SHARE)
    """Fraction of steps whose gradient holds a NaN."""
    nonfinite_gradient_inf: float | None = field(metadata=SHARE)
    """Fraction of steps whose gradient holds an infinity and no NaN."""
    skipped_updates: int = field(metadata=NOT_NEGATIVE)
    """Steps whose update was left out because the gradient was not finite."""
    nonfinite_microbatch: float | None = field(metadata=SHARE)
    """Fraction of micro-batches whose loss is NaN or infinite."""
    nonfinite_microbatch_nan: float | None = field(metadata=SHARE)
    """Fraction of micro-batches whose loss is NaN."""
    nonfinite_microbatch_inf: float | None = field(metadata=SHARE)
    """Fraction of micro-batches whose loss is infinite."""
    loss_p99: float | None
    """p99 of the training loss, CE and auxiliary, in nats per token (mean over the tokens of a step)."""
    loss_p999: float | None
    """p99.9 of the training loss."""
    loss_max: float | None
    """Largest training loss."""
    train_ce_p99: float | None = field(metadata=NATS)
    """p99 of the CE part of the training loss, in nats per token."""
    train_ce_p999: float | None = field(metadata=NATS)
    """p99.9 of the CE part of the training loss."""
    train_ce_max: float | None = field(metadata=NATS)
    """Largest CE part of the training loss."""
    spike_rate: float | None = field(metadata=SHARE)
    """Fraction of steps with L_s − L_{s−1} above the spike threshold (nats) or a nonfinite L_s, of those with a predecessor."""
    adam_samples: int = field(metadata=NOT_NEGATIVE)
    """Steps at which Adam's state was read."""
    adam_v_max: float | None = field(metadata=NOT_NEGATIVE)
    """Largest ‖v‖∞ over the samples, v Adam's second moment after the step."""
    adam_v_p99: float | None = field(metadata=NOT_NEGATIVE)
    """p99 of ‖v‖∞ over the samples."""
    adam_d_inf_p99: float | None = field(metadata=NOT_NEGATIVE)
    """p99 of ‖d‖∞ over the samples, d = m/(√v + ε), before learning rate and weight decay."""
    adam_d_ratio_p99: float | None = field(metadata=NOT_NEGATIVE)
    """p99 of ‖d‖₂/‖θ‖₂ over the samples, θ after the step."""
    adam_corrected_d_inf_p99: float | None = field(metadata=NOT_NEGATIVE)
    """As `adam_d_inf_p99`, for the bias-corrected direction."""
    adam_corrected_d_ratio_p99: float | None = field(metadata=NOT_NEGATIVE)
    """As `adam_d_ratio_p99`, for the bias-corrected direction."""

    def check(self) -> None:
        """Refuse endpoints that contradict each other: a quantile above the maximum, more events than steps."""
        flat = self.flat()
        for name, low in flat.items():
            quantity, _, tail = name.rpartition("_")
            for above in {"p99": ("p999", "max"), "p999": ("max",)}.get(tail, ()):
                high = flat.get(f"{quantity}_{above}")
                if low is not None and high is not None and low > high + 1e-9 * abs(high):
                    raise InputError(
                        f"`{name}` is expected to be at most `{quantity}_{above}`, which is {high!r}, but is {low!r}."
                    )
        for name in ("skipped_updates", "adam_samples"):
            if getattr(self, name) > self.steps:
                raise InputError(
                    f"`{name}` is expected to be at most `steps`, which is {self.steps}, but is {getattr(self, name)}."
                )

    def flat(self) -> dict[str, float | int | None]:
        """Every endpoint under its key in metrics.json, in the order of the file."""
        flat: dict[str, float | int | None] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            flat |= value if entry.name == "phi" else {entry.name: value}
        return flat

    @classmethod
    def from_flat(cls, data: dict[str, Any]) -> StepEndpoints:
        """The inverse of `flat`; keys that are none of its own are left aside."""
        return from_plain(cls, {**data, "phi": {key: value for key, value in data.items() if key.startswith(PHI)}})
