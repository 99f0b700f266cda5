"""The numbers of many tokens that people log: means and tails by name, in one transfer to the host.

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

A quantity that does not exist for these logits has no entry; without a valid token only `tokens` is there. Quantiles are
interpolated linearly between order statistics. A NaN at a valid token makes the mean and the maximum NaN.

Scaling: every token counts once, whatever the reduction and the weights of the loss are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zloss.source.statistics import TokenStats

LEVELS = {"99": 0.99, "999": 0.999, "max": 1.0}
"""Part of a name → level of the quantile."""


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


@torch.no_grad()
def token_values(stats: TokenStats) -> dict[str, Tensor]:
    """Every quantity that exists, one value per token, NaN at ignored tokens: [T], on the device."""
    found = {name: of(stats) for name, of in (MEANS | TAILS).items()}
    ignored = ~stats.valid.flatten()
    return {name: value.flatten().masked_fill(ignored, math.nan) for name, value in found.items() if value is not None}


def summarize(parts: Sequence[TokenStats]) -> dict[str, float]:
    """The table above over all tokens of all parts (micro-batches, steps)."""
    valid = torch.cat([part.valid.flatten() for part in parts])
    return summarize_values(joined([token_values(part) for part in parts]), valid.sum())


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The quantities that all parts have, on one token axis."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: torch.cat([part[name] for part in parts]) for name in names}


@torch.no_grad()
def summarize_values(values: dict[str, Tensor], tokens: Tensor) -> dict[str, float]:
    """The table above of values [T] that are NaN beyond `tokens` of them. All quantities go through the same operations."""
    if not values:
        return {"tokens": float(tokens)}
    means_Q = sum_of_valid(torch.stack(list(values.values())), tokens) / tokens
    tails = [name for name in values if name not in MEANS]
    numbers = [tokens.double().reshape(1), means_Q]
    if tails:
        numbers.append(
            quantiles(torch.stack([values[name] for name in tails]), tokens, tuple(LEVELS.values())).flatten()
        )
    names = ["tokens", *(name if name in MEANS else entry_name(name, "mean") for name in values)]
    names += [entry_name(name, level) for name in tails for level in LEVELS]
    found = dict(zip(names, torch.cat(numbers).tolist(), strict=True))
    return found if found["tokens"] else {"tokens": 0.0}


def sum_of_valid(values_QT: Tensor, tokens: Tensor) -> Tensor:
    """Σ over the valid tokens in fp64, [Q]; NaN where a valid token has one. Ignored tokens are NaN and add nothing."""
    broken_Q = values_QT.isnan().sum(dim=-1) > values_QT.shape[-1] - tokens
    return values_QT.double().nansum(dim=-1).masked_fill(broken_Q, math.nan)


def entry_name(quantity: str, level: str) -> str:
    """p_z has its coordinate at the end, as the reports write it (p_z_999_raw); the others read log_z_p999."""
    if quantity.startswith("p_z_"):
        return f"p_z_{level}_{quantity.removeprefix('p_z_')}"
    return f"{quantity}_p{level}" if level.isdigit() else f"{quantity}_{level}"


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
    """The q-quantile of all values, 0-d in fp64; NaN of nothing. `torch.quantile` refuses more than 2²⁴ values."""
    flat = values.reshape(1, -1)
    return quantiles(flat, torch.tensor(flat.shape[1], device=values.device), (q,))[0, 0]
