"""How far apart two sets of log-probabilities of the same tokens are: the record, and its numbers from δ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

BANDS = {"outside_tight": (0.999, 1.002), "outside_1": (0.99, 1.01), "outside_5": (0.95, 1.05)}
"""Bands on the probability ratio e^δ that RL trainers watch, by the name of the share of tokens outside."""


@dataclass(frozen=True)
class LogprobGap:
    """δ = log p(y) of the trainer − log p(y) of the sampler, in nats, over tokens; e^δ is the importance ratio.

    Every number is over the tokens whose δ is finite, and None without any. Sums are per sequence: Σδ is the log of the
    sequence's ratio.
    """

    tokens: int
    """Tokens with a finite δ."""
    nonfinite: int
    """Tokens with a δ of NaN or ±∞."""
    rms: float | None
    """Root mean square of δ."""
    p99_abs: float | None
    """99 % quantile of |δ|."""
    mean: float | None
    """Mean of δ."""
    mean_se: float | None
    """Standard error of the mean, treating tokens as independent; None for fewer than two."""
    outside_tight: float | None
    """Share of tokens whose e^δ is outside [0.999, 1.002]."""
    outside_1: float | None
    """Share of tokens whose e^δ is outside ±1 %."""
    outside_5: float | None
    """Share of tokens whose e^δ is outside ±5 %."""
    sequence_tokens: tuple[int, ...] = ()
    """Tokens with a finite δ in each sequence."""
    sequence_sums: tuple[float, ...] = ()
    """Σδ of each sequence."""

    @property
    def sequence_means(self) -> tuple[float | None, ...]:
        """Mean δ of each sequence; None for one without tokens."""
        pairs = zip(self.sequence_sums, self.sequence_tokens, strict=True)
        return tuple(total / tokens if tokens else None for total, tokens in pairs)

    def __str__(self) -> str:
        if not self.tokens:
            return f"log-probability gap: no token with a finite gap ({self.nonfinite} nonfinite)"
        error = "" if self.mean_se is None else f" ± {self.mean_se:.2g}"
        lines = [
            f"log-probability gap over {self.tokens:,} tokens (nat)",
            f"  RMS {self.rms:.4g}, p99 |δ| {self.p99_abs:.4g}, mean {self.mean:+.3g}{error}",
            f"  ratio outside [0.999, 1.002]: {self.outside_tight:.1%}, ±1 %: {self.outside_1:.1%}, ±5 %: {self.outside_5:.1%}",
        ]
        if self.sequence_sums:
            largest = max(range(len(self.sequence_sums)), key=lambda at: abs(self.sequence_sums[at]))
            lines.append(
                f"  {len(self.sequence_sums)} sequences: largest |Σδ| {abs(self.sequence_sums[largest]):.3g}, in sequence "
                f"{largest} of {self.sequence_tokens[largest]:,} tokens"
            )
        if self.nonfinite:
            lines.append(f"  left out: {self.nonfinite:,} tokens whose gap is not finite")
        return "\n".join(lines)


def gap_of(sequences: Sequence[NDArray[Any]]) -> LogprobGap:
    """The numbers of δ, one array per sequence."""
    kept = [one[np.isfinite(one)].astype(np.float64) for one in sequences]
    delta = np.concatenate([np.empty(0), *kept])
    tokens = int(delta.size)
    given = sum(int(one.size) for one in sequences)
    shares = {
        name: float(np.mean((delta < math.log(low)) | (delta > math.log(high)))) if tokens else None
        for name, (low, high) in BANDS.items()
    }
    return LogprobGap(
        tokens=tokens,
        nonfinite=given - tokens,
        rms=math.sqrt(np.mean(delta**2)) if tokens else None,
        p99_abs=float(np.quantile(np.abs(delta), 0.99)) if tokens else None,
        mean=float(delta.mean()) if tokens else None,
        mean_se=float(delta.std(ddof=1) / math.sqrt(tokens)) if tokens > 1 else None,
        **shares,
        sequence_tokens=tuple(int(one.size) for one in kept),
        sequence_sums=tuple(float(one.sum()) for one in kept),
    )


Format = Literal["bf16", "fp16"]
NoiseCase = Literal["storage", "product", "operands"]
"""What is rounded to 16 bits: the fp32 logits; hidden states, head and logits; hidden states and head alone."""
NoiseHead = Literal["raw", "centered", "softcapped"]
"""The head as it is; with its mean row subtracted, as it would be saved; with logits capped at 30·tanh(z/30)."""


@dataclass(frozen=True)
class LogprobNoise:
    """Log-probabilities from 16-bit logits against those from fp32 logits of the same weights: δ = log p₁₆ − log p₃₂.

    The share of the head alone. +δ is the log-ratio of a 16-bit trainer to an exact sampler, −δ that of an exact trainer to
    a 16-bit sampler.
    """

    format: Format
    """The 16-bit format."""
    case: NoiseCase
    """What is rounded to it: "storage" the fp32 logits, "product" hidden states, head and logits, "operands" the first two."""
    head: NoiseHead
    """ "raw" as it is, "centered" as it would be saved, "softcapped" with logits 30·tanh(z/30)."""
    gap: LogprobGap
    """δ of the tokens of the text."""
    on_policy_rms: float | None
    """√ of the mean over positions of Σ_i p₃₂(i)·δ(i)²: the RMS for tokens that the model itself samples, exactly."""
    kl: float | None
    """Mean over positions of KL(p₃₂ ‖ p₁₆), exactly; the on-policy mean of δ is −KL."""
