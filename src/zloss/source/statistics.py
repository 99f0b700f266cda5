"""Per-token statistics of a softmax, computed once and shared by forward and backward.

Axes: T tokens, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from zloss.source.summary import summarize


@dataclass(frozen=True)
class TokenStats:
    """What a backend measures of every token: the raw quantities, the centered ones beside them.

    All tensors have the shape of `target`, are detached, and are fp32 (fp64 for fp64 inputs). A statistic that does
    not exist for these logits, or was not asked for, is None; `zloss.transport.statistics_plan` has the rule.

    Scaling: per token, independent of any reduction.
    """

    row_max: Tensor
    """m = max_i z_i."""
    log_s: Tensor
    """log S with S = Σ_i exp(z_i − m); log Z = m + log S. Kept apart because differences are accurate in it."""
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
        """Mean, p99, p99.9 and maximum of what people log, over the valid tokens; see `zloss.source.summary`."""
        return summarize([self])

    def reshape(self, shape: torch.Size) -> TokenStats:
        """The same statistics with the token axis laid out as `shape`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.reshape(shape) for name, tensor in tensors.items()})
