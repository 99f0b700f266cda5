"""Per-token statistics of a softmax: what they are, which of them a pass computes, and the summary that people log.

Statistics are computed once and shared by forward and backward. Which ones a pass returns is one rule for every backend
(`plan_statistics`). row_max, log_s, target_logit and valid are always there. The others:

| statistic      | "full" | "audit" | "light"                                     | needs                     |
|----------------|--------|---------|---------------------------------------------|---------------------------|
| mu             | yes    | yes     | if the objective or label smoothing needs μ | logits that have a mean   |
| p_norm         | yes    | yes     | if the objective needs the gain             |                           |
| gain           | yes    | yes     | if the objective needs the gain             | the head                  |
| gain_centered  | yes    | yes     | no                                          | the head, and a mean      |
| entropy        | yes    | yes     | no                                          | hidden states, or "audit" |
| predicted      | no     | yes     | no                                          |                           |
| mu_residual    | no     | yes     | no                                          | hidden states, and a mean |

Softcapped logits and logits with a bias of -inf have no mean that is a coordinate. The entropy comes from the hidden
states and E W, without a further pass. For softcapped logits and a bias of -inf it costs one pass over E; for logits
without hidden states likewise, and there only "audit" computes it.

Axes: T tokens, V vocabulary, D width, Q quantities, L levels of a quantile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from zloss.results.quantities import SCALARS


@dataclass(frozen=True)
class TokenStats:
    """What a backend measures for every token: the raw quantities and the centered ones.

    All tensors have the shape of `target`, are detached, and fp32 (fp64 for fp64 inputs) where no other type is named. A
    statistic that does not exist for these logits, or was not requested, is None; the table of this module has the rule.

    At ignored tokens the statistics are those of whatever the logits are there; mask them with `valid`, as `summary` does.

    Scaling: per token, independent of any reduction.
    """

    row_max: Tensor
    """m = max_i z_i."""
    log_s: Tensor
    """log S with S = Σ_i exp(z_i − m); log Z = m + log S. Stored separately because differences are accurate in it."""
    target_logit: Tensor
    """z_y; 0 at ignored tokens."""
    valid: Tensor
    """bool; False at ignored tokens."""
    vocab: int
    """V, the number of rows inside log Z."""
    mu: Tensor | None = None
    """μ = mean logit = w̄·u + b̄."""
    p_norm: Tensor | None = None
    """‖p‖₂."""
    gain: Tensor | None = None
    """A_p = ‖Wᵀp‖₂ / ‖p‖₂ (paper eq:ap, ε-free)."""
    gain_centered: Tensor | None = None
    """‖Wᵀp − w̄‖₂ / ‖p‖₂: the gain of the row-centered head."""
    entropy: Tensor | None = None
    """H = −Σ_i p_i log p_i = log Z − Σ_i p_i z_i, in nats."""
    predicted: Tensor | None = None
    """arg max_i z_i as int64; of equal logits the first, as `torch.argmax` breaks ties. Only with statistics="audit"."""
    mu_residual: Tensor | None = None
    """Mean of the computed logits minus w̄·u + b̄: rounding of the logits. Only with statistics="audit"."""

    @property
    def log_z(self) -> Tensor:
        """log Z."""
        return self.row_max + self.log_s

    @property
    def log_z_centered(self) -> Tensor | None:
        """log Z̃ = log Z − μ; formed from m − μ, so that a large common shift cancels before anything is added."""
        return None if self.mu is None else self.log_s + (self.row_max - self.mu)

    @property
    def target_log_prob(self) -> Tensor:
        """log p_y = (z_y − m) − log S, free of the common shift; meaningless at ignored tokens."""
        return (self.target_logit - self.row_max) - self.log_s

    @property
    def top1(self) -> Tensor:
        """bool: the target has the largest logit (ties count); False at ignored tokens."""
        return (self.target_logit >= self.row_max) & self.valid

    @property
    def nonfinite(self) -> Tensor:
        """bool: tokens whose normalizer or target logit is NaN or infinite."""
        return ~(torch.isfinite(self.log_z) & torch.isfinite(self.target_logit))

    def summary(self) -> dict[str, float]:
        """Mean, p99, p99.9 and maximum of what people log, over the valid tokens; see `summarize`."""
        return summarize([self])

    def reshape(self, shape: torch.Size) -> TokenStats:
        """The same statistics with the token axis laid out as `shape`."""
        if shape == self.valid.shape:
            return self
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.reshape(shape) for name, tensor in tensors.items()})


Statistics = Literal["full", "light", "audit"]
""""full": every statistic that costs no further pass over the logits, and the entropy where hidden states are known;
"light": only what the loss itself needs; "audit": full, and the entropy, the predicted token and the residual mean of any
logits, each of which costs one more pass over them."""

ALWAYS = ("row_max", "log_s", "target_logit")
OPTIONAL = ("mu", "p_norm", "gain", "gain_centered", "entropy", "predicted", "mu_residual")


@dataclass(frozen=True)
class StatisticsPlan:
    """True for every optional field of `TokenStats` that is present; the names are those of `TokenStats`."""

    mu: bool
    p_norm: bool
    gain: bool
    gain_centered: bool
    entropy: bool
    predicted: bool
    mu_residual: bool

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the per-token fields of `TokenStats` that are not None, other than `valid`."""
        return (*ALWAYS, *(name for name in OPTIONAL if getattr(self, name)))


def plan_statistics(
    level: Statistics, *, needs_mu: bool, needs_gain: bool, has_mu: bool, has_head: bool, has_hidden: bool
) -> StatisticsPlan:
    """The table of this module. `needs_…`: what the loss itself uses; `has_mu`: the logits have a mean; `has_head`,
    `has_hidden`: whether W and the hidden states are known."""
    more = level != "light"
    gain = has_head and (more or needs_gain)
    return StatisticsPlan(
        mu=has_mu and (more or needs_mu),
        p_norm=more or gain,
        gain=gain,
        gain_centered=gain and has_mu and more,
        entropy=(more and has_hidden) or level == "audit",
        predicted=level == "audit",
        mu_residual=has_mu and has_hidden and level == "audit",
    )


def _deviation(log_z: Tensor | None, vocab: int) -> Tensor | None:
    return None if log_z is None else (log_z - math.log(vocab)).abs()


MEANS: dict[str, Callable[[TokenStats], Tensor | None]] = {
    "ce": lambda stats: -stats.target_log_prob,
    "entropy": lambda stats: stats.entropy,
    "accuracy": lambda stats: stats.top1.to(stats.log_s.dtype),
}
"""Quantities of which the mean is logged, by name."""
TAILS: dict[str, Callable[[TokenStats], Tensor | None]] = {
    "log_z": lambda stats: stats.log_z,
    "p_z_raw": lambda stats: _deviation(stats.log_z, stats.vocab),
    "p_z_centered": lambda stats: _deviation(stats.log_z_centered, stats.vocab),
    "mu_abs": lambda stats: None if stats.mu is None else stats.mu.abs(),
    "gain": lambda stats: stats.gain,
    "gain_centered": lambda stats: stats.gain_centered,
}
"""Quantities of which mean and tail are logged, by name."""
LEVELS = (0.99, 0.999, 1.0)
"""The levels of a tail: p99, p99.9 and the maximum."""


@torch.no_grad()
def token_values(stats: TokenStats) -> dict[str, Tensor]:
    """Every quantity that exists, one value per token, NaN at ignored tokens: [T], on the device."""
    found = {name: of(stats) for name, of in (MEANS | TAILS).items()}
    ignored = ~stats.valid.flatten()
    return {name: value.flatten().masked_fill(ignored, math.nan) for name, value in found.items() if value is not None}


def summarize(parts: Sequence[TokenStats]) -> dict[str, float]:
    """The numbers that people log, over all tokens of all parts (micro-batches, steps), in one transfer to the host.

    | name                                | of every valid token                                      |
    |-------------------------------------|-----------------------------------------------------------|
    | ce, entropy, accuracy               | mean of −log p_y, of H, of top-1; nats, nats, fraction    |
    | log_z_mean, _p99, _p999, _max       | log Z                                                     |
    | p_z_mean_raw, p_z_99_raw, …         | |log Z − log V|                                           |
    | p_z_mean_centered, …                | |log Z̃ − log V|, with log Z̃ = log Z − μ                   |
    | mu_abs_mean, _p99, _p999, _max      | |μ|                                                       |
    | gain_mean, _p99, _p999, _max        | A_p                                                       |
    | gain_centered_mean, …               | A_p of the row-centered head                              |
    | tokens                              | how many tokens these are                                 |

    A quantity that does not exist for these logits has no entry; without a valid token only `tokens` is there. Quantiles
    are interpolated linearly between order statistics. A NaN at a valid token makes the mean and the maximum NaN.

    Scaling: every token counts once, whatever the reduction and the weights of the loss are.
    """
    valid = torch.cat([part.valid.flatten() for part in parts])
    return summarize_values(joined([token_values(part) for part in parts]), valid.sum())


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The quantities that all parts have, on one token axis."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: torch.cat([part[name] for part in parts]) for name in names}


@torch.no_grad()
def summarize_values(values: dict[str, Tensor], tokens: Tensor) -> dict[str, float]:
    """The table of `summarize` from values [T] of which `tokens` are not NaN. All quantities go through the same operations."""
    if not values:
        return {"tokens": float(tokens)}
    means_Q = sum_of_valid(torch.stack(list(values.values())), tokens) / tokens
    tails = [name for name in values if name not in MEANS]
    numbers = [tokens.double().reshape(1), means_Q]
    if tails:
        numbers.append(quantiles(torch.stack([values[name] for name in tails]), tokens, LEVELS).flatten())
    names = ["tokens", *(SCALARS[name][0] for name in values), *(tail for name in tails for tail in SCALARS[name][1:])]
    found = dict(zip(names, torch.cat(numbers).tolist(), strict=True))
    return found if found["tokens"] else {"tokens": 0.0}


def sum_of_valid(values_QT: Tensor, tokens: Tensor) -> Tensor:
    """Σ over the valid tokens in fp64, [Q]; NaN where a valid token has one. Ignored tokens are NaN and add nothing."""
    broken_Q = values_QT.isnan().sum(dim=-1) > values_QT.shape[-1] - tokens
    return values_QT.double().nansum(dim=-1).masked_fill(broken_Q, math.nan)


def quantiles(values_QT: Tensor, tokens: Tensor, levels: Sequence[float]) -> Tensor:
    """Quantiles [Q, L] in fp64 over the first `tokens` of the sorted values, linear between order statistics.

    Ignored tokens are NaN and NaN is sorted last, so the first `tokens` are the valid ones, nonfinite ones included. The
    count stays on the device. NaN where there is no token.
    """
    if not values_QT.shape[-1]:
        return values_QT.new_full((len(values_QT), len(levels)), math.nan, dtype=torch.float64)
    ordered_QT = values_QT.sort(dim=-1).values
    last = (tokens - 1).clamp_min(0)
    rank_L = torch.tensor(levels, dtype=torch.float64, device=values_QT.device) * last
    low_L = rank_L.floor().long()
    below_QL = ordered_QT[:, low_L].double()
    above_QL = ordered_QT[:, torch.minimum(low_L + 1, last)].double()
    return torch.where(rank_L == low_L, below_QL, torch.lerp(below_QL, above_QL, rank_L - low_L))


def exact_quantile(values: Tensor, q: float) -> Tensor:
    """The q-quantile of all values, 0-d in fp64; NaN of nothing. `torch.quantile` rejects more than 2²⁴ values."""
    flat = values.reshape(1, -1)
    return quantiles(flat, torch.tensor(flat.shape[1], device=values.device), (q,))[0, 0]
