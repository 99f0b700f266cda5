"""Optimizer steps as plain numbers: a line of steps.jsonl, and the endpoints of metrics.json (paper app:endpoints).

Norms are over all trained parameters as one vector. A number that is not finite is null in the file and NaN when read back;
`gradient`, `micro_nan` and `micro_inf` say what it was. Suffixes of endpoints: `_p99` and `_p999` are quantiles over the steps
with a finite value, interpolated linearly between order statistics, and `_max` is their maximum. Rates are fractions between
0 and 1. An endpoint is None if no step has a finite value.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from zloss.errors import InputError
from zloss.results.io import parse_json
from zloss.results.record import NATS, NOT_NEGATIVE, SHARE, flat, from_plain, to_plain, within

PHI = "phi_"
"""Beginning of the keys of the event rates Φ_τ; the threshold τ follows."""


@dataclass(frozen=True, kw_only=True)
class StepEndpoints:
    """Summary of the steps of one run."""

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
    """p99 of ‖g‖₂ after clipping, as the optimizer received it."""
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
    phi: dict[str, float | None] = field(default_factory=dict, metadata={**SHARE, **flat(PHI)})
    """Φ_τ by its key (`phi_10` for τ = 10): fraction of all steps with ‖g‖₂ > τ before clipping or a nonfinite gradient.

    The thresholds are a setting of the run, so these keys are open; in the file they are next to the others.
    """
    nonfinite_gradient: float | None = field(metadata=SHARE)
    """Fraction of steps whose gradient holds a NaN or an infinity."""
    nonfinite_gradient_nan: float | None = field(metadata=SHARE)
    """Fraction of steps whose gradient holds a NaN."""
    nonfinite_gradient_inf: float | None = field(metadata=SHARE)
    """Fraction of steps whose gradient holds an infinity and no NaN."""
    skipped_updates: int = field(metadata=NOT_NEGATIVE)
    """Steps whose update was skipped because the gradient was not finite."""
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
    """Like `adam_d_inf_p99`, but for the bias-corrected direction."""
    adam_corrected_d_ratio_p99: float | None = field(metadata=NOT_NEGATIVE)
    """Like `adam_d_ratio_p99`, but for the bias-corrected direction."""

    def check(self) -> None:
        """Reject endpoints that contradict each other: a quantile above the maximum, more events than steps."""
        numbers: dict[str, float | None] = to_plain(self)
        for name, low in numbers.items():
            quantity, _, tail = name.rpartition("_")
            for above in {"p99": ("p999", "max"), "p999": ("max",)}.get(tail, ()):
                high = numbers.get(f"{quantity}_{above}")
                if low is not None and high is not None and low > high + 1e-9 * abs(high):
                    raise InputError(
                        f"`{name}` is expected to be at most `{quantity}_{above}`, which is {high!r}, but is {low!r}."
                    )
        for name in ("skipped_updates", "adam_samples"):
            if getattr(self, name) > self.steps:
                raise InputError(
                    f"`{name}` is expected to be at most `steps`, which is {self.steps}, but is {getattr(self, name)}."
                )


GradientState = Literal["finite", "nan", "inf"]
"""What the entries of a gradient are: all finite, or one is NaN, or one is infinite and none is NaN."""


@dataclass(frozen=True)
class AdamSample:
    """Adam's state after a sampled step; d = m/(√v + ε) is its direction before learning rate and weight decay."""

    v_inf: float = field(metadata=NOT_NEGATIVE)
    """‖v‖∞ of the second moment."""
    d_norm: float = field(metadata=NOT_NEGATIVE)
    """‖d‖₂."""
    d_inf: float = field(metadata=NOT_NEGATIVE)
    """‖d‖∞."""
    corrected_d_norm: float = field(metadata=NOT_NEGATIVE)
    """‖d‖₂ of the bias-corrected direction."""
    corrected_d_inf: float = field(metadata=NOT_NEGATIVE)
    """‖d‖∞ of the bias-corrected direction."""
    param_norm: float = field(metadata=NOT_NEGATIVE)
    """‖θ‖₂ after the step."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int = field(metadata=within(1))
    """Its number, from 1."""
    loss: float
    """L_s in nats per token: sum of the contributions of the micro-batches, CE and auxiliary."""
    cross_entropy: float = field(metadata=NATS)
    """CE part of the loss, in nats per token."""
    auxiliary: float
    """Auxiliary part of the loss, its coefficient included."""
    grad_norm: float = field(metadata=NOT_NEGATIVE)
    """‖g‖₂ before clipping."""
    grad_inf: float = field(metadata=NOT_NEGATIVE)
    """‖g‖∞ before clipping."""
    param_norm: float = field(metadata=NOT_NEGATIVE)
    """‖θ‖₂ before the step, where g was taken."""
    postclip_norm: float = field(metadata=NOT_NEGATIVE)
    """‖g‖₂ after clipping."""
    postclip_inf: float = field(metadata=NOT_NEGATIVE)
    """‖g‖∞ after clipping."""
    micro_batches: int = field(default=1, metadata=within(1))
    """Micro-batches of the step."""
    micro_nan: int = field(default=0, metadata=NOT_NEGATIVE)
    """Micro-batches whose loss is NaN."""
    micro_inf: int = field(default=0, metadata=NOT_NEGATIVE)
    """Micro-batches whose loss is infinite."""
    gradient: GradientState = "finite"
    """Whether the gradient before clipping was finite."""
    updated: bool = True
    """False if the update was skipped because its gradient was not finite."""
    lr: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """Learning rate of the step; None if the loop did not report it."""
    seconds: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """Wall-clock time of the step, in seconds; None if the loop did not report it."""
    telemetry: dict[str, float | None] = field(default_factory=dict)
    """Further numbers by key, from the tokens of the step: tails of the head, numbers of the routers."""
    adam: AdamSample | None = None
    """Adam's state; None at a step where it was not sampled."""

    def to_json(self) -> str:
        """One line of strict JSON; a number that is not finite becomes null."""
        return json.dumps(to_plain(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """The inverse of `to_json`; a key that is missing, ill-typed or out of its range is named."""
        try:
            data = parse_json(line)
        except ValueError as error:
            raise InputError(f"it is not JSON ({error}).") from error
        record = from_plain(cls, _null_is_nan(cls, data))
        for entry in fields(cls):
            if entry.name not in data:
                raise InputError(f"`{entry.name}` is missing.")
        if record.micro_nan + record.micro_inf > record.micro_batches:
            raise InputError(
                f"`micro_nan` + `micro_inf` is expected to be at most `micro_batches`, which is {record.micro_batches}, but is "
                f"{record.micro_nan + record.micro_inf}."
            )
        return record


def _null_is_nan(record_type: Any, data: Any) -> Any:
    """`data` with NaN for each null under a key that always has a number."""
    if not isinstance(data, dict):
        return data
    numbers = {entry.name for entry in fields(record_type) if entry.type == "float"}
    read = {key: math.nan if value is None and key in numbers else value for key, value in data.items()}
    return read | {"adam": _null_is_nan(AdamSample, read["adam"])} if read.get("adam") else read
