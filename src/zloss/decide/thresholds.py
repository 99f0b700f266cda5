"""When a stage of the decision map fires.

The paper names the triggers and leaves the thresholds open: these numbers are ours, each with its reason, and each
can be set. docs/decisions.md shows what they decide on the paper's own models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from zloss.results.options import check_numbers


@dataclass(frozen=True)
class Limits:
    """Numbers ≥ 0 by name."""

    def __post_init__(self) -> None:
        check_numbers(self, [field.name for field in fields(self)])

    def to_dict(self) -> dict[str, Any]:
        """Name → value, as results store them."""
        return asdict(self)


@dataclass(frozen=True)
class Thresholds(Limits):
    """Thresholds of the decision map (ours, not the paper's)."""

    shift_over_log_v: float = 1.0
    """Source coordinate fires when p99 |μ| exceeds this many log V: the shift alone is then as large as the target c."""
    component_share: float = 0.1
    """Objective decomposition fires when the smaller of E μ² and E(log Z̃ − c)² exceeds this share of their sum: one λ then
    acts on two coordinates at once."""
    negligible_rms: float = 1.0
    """Objective decomposition stays quiet while the root mean squares of μ and of log Z̃ − c are both below this many
    nats: at λ = 1e-4 a violation of one nat adds 1e-4 nat to the loss."""
    gain_99: float = 10.0
    """Architectural transport fires when raw A_p^99 exceeds this: at 1/√β = 10 (β = 0.01) gain-aware weighting halves the
    source."""
    input_path_ratio: float = 0.1
    """Shared pathway fires when the input-path norm exceeds this share of the output-path norm on a tied table."""
    negligible_r_z: float = 0.005
    """Shared pathway stays quiet while the larger path of the Z gradient, at λ = 1e-3, is below this share of the CE
    gradient of the table: a tenth of `r_z_budget`, at the largest usual λ."""
    delta_src: float = 0.01
    """Implementation fires when Δ_src of an audited loss exceeds this: fp16 storage stays near it, bf16 exceeds it more
    than sixfold."""
    delta_theta: float = 0.01
    """Implementation also fires when Δ_θ, the relative error of a parameter gradient, exceeds this: rounding dW to bf16
    alone causes 0.002."""
    router_scale_tolerance: float = 0.01
    """Router reduction fires when |s_rel − 1| exceeds this."""
    grad_tail_ratio: float = 2.0
    """Optimizer consequence fires when a method's p99 (or p99.9) pre-clip gradient norm exceeds this many times the
    baseline's."""
    grad_max_ratio: float = 3.0
    """Optimizer consequence also fires when the largest pre-clip gradient norm exceeds this many times the baseline's: a
    maximum is one step, so it is given more room than a quantile."""
    event_rate_increase: float = 0.01
    """Optimizer consequence also fires when a Φ_τ exceeds the baseline's by this fraction of steps."""
    adam_state_ratio: float = 9.0
    """Optimizer consequence also fires when ‖v‖∞ of Adam exceeds this many times the baseline's: v is quadratic in the
    gradient, and 9 = `grad_max_ratio`²."""
    spike_rate_increase: float = 0.02
    """Optimizer consequence also fires when the rate of loss spikes exceeds the baseline's by this fraction of steps."""
    fp16_margin_ratio: float = 3.0
    """Optimizer consequence also fires when the largest safe fp16 loss scale κ falls below the baseline's divided by this."""
    quality_tolerance: float = 0.01
    """Quality gate fires when PPL rises by more than this share of the baseline's; a tolerance stated by the comparison
    replaces it."""
    r_z_budget: float = 0.05
    """The R_Z for which λ is solved: between the 3.5 % of the paper's quality-neutral runs and the 17.5 % it calls large."""

    shift_noise: float = 0.01
    """A common shift can matter once the error of the target's log-probability reaches this, in nats (RMS): the ±1 % band
    of a probability ratio."""
    shift_bits: float = 1.0
    """It does matter if centering would also recover this many bits of that error: log₂ of the error before over the
    error after."""
    normalizer_noise: float = 0.05
    """The log-normalizer matters if 16-bit logits of the centered head, as saved, still have this error, in nats (RMS)."""
    gain_share: float = 0.1
    """The gain matters if p99 ‖δ_u‖ of Z reaches this share of that of CE."""
    input_path_share: float = 0.05
    """The input path of a tied table matters if its Z gradient reaches this share of the CE gradient of the table."""
    implementation_error: float = 0.01
    """The implementation matters if the relative error of the CE+Z gradient exceeds this, or an error was found."""
    router_share: float = 0.1
    """The router matters if the router Z gradient exceeds this share of the CE gradient on the router weights."""
    least_tokens: float = 2000
    """Fewer tokens than this are not enough evidence for a verdict on a checkpoint."""


WHY = {
    "shift_over_log_v": "p99 |μ| in units of log V: at 1 the shift alone is as large as the target c",
    "component_share": "below a tenth one coordinate dominates the penalty, and one λ is enough",
    "negligible_rms": "nats; at λ = 1e-4 a violation of one nat adds 1e-4 nat to the loss",
    "gain_99": "A_p = 1/√β with β = 0.01, where gain-aware weighting halves the source",
    "input_path_ratio": "a tenth of the norm is a hundredth of the squared update",
    "negligible_r_z": "a tenth of r_z_budget, at λ = 1e-3, the largest usual one",
    "delta_src": "fp16 logits stay near it; bf16 logits exceed it more than sixfold",
    "delta_theta": "rounding dW to bf16 alone causes 0.002",
    "router_scale_tolerance": "s_rel is exact arithmetic, so anything but rounding is another convention",
    "grad_tail_ratio": "a doubled p99 of the gradient norm is far outside the noise of seeds",
    "grad_max_ratio": "a maximum is one step, so it has more room than a quantile",
    "event_rate_increase": "one step in a hundred, the steps beyond a p99",
    "adam_state_ratio": "v is quadratic in the gradient: the square of grad_max_ratio",
    "spike_rate_increase": "one step in fifty",
    "fp16_margin_ratio": "the inverse of grad_max_ratio, for the largest safe loss scale κ",
    "quality_tolerance": "1 % of the baseline's PPL, unless the comparison states a tolerance",
    "r_z_budget": "between the 3.5 % of the paper's quality-neutral runs and the 17.5 % that it calls large",
    "shift_noise": "nats (RMS); 16-bit logits that cost less, a probability off by 1 %, need no centering",
    "shift_bits": "bits of that error that centering must recover: one bit of mantissa is worth a new checkpoint",
    "normalizer_noise": "nats (RMS) that remain with a centered head: a probability off by 5 %",
    "gain_share": "the largest Z gradients at the hidden states are a tenth of the largest of CE",
    "input_path_share": "the budget of R_Z, spent on the input embedding alone",
    "implementation_error": "like delta_src, for the combined CE+Z gradient that the optimizer sees",
    "router_share": "a tenth of the CE gradient on the router weights",
    "least_tokens": "fewer tokens leave fewer than two beyond p99.9",
}
"""Threshold → its reason in one clause; docs/decisions.md has them in full."""


def stored_thresholds(stored: dict[str, float | None]) -> Thresholds:
    """The thresholds a report was decided with; a name it lacks has its default, an unknown name is ignored."""
    known = {field.name for field in fields(Thresholds)}
    return Thresholds(**{name: value for name, value in stored.items() if name in known and value is not None})
