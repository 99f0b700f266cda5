"""The router section of an audit: what the routers of a mixture-of-experts model did on a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid", "unknown"]


@dataclass(frozen=True)
class RouterTail:
    """A distribution over routing decisions."""

    mean: float | None
    """Mean over decisions."""
    p50: float | None
    """Median."""
    p99: float | None
    """99 % quantile."""
    p999: float | None
    """99.9 % quantile."""


@dataclass(frozen=True)
class RouterLayer:
    """One router, over all batches."""

    name: str
    """Name of its module in the model."""
    log_z_mean: float
    """Mean log Z_R over its decisions."""
    entropy: float
    """Mean entropy of its softmax, in nats."""
    load_cv: float | None
    """Coefficient of variation of its load over experts."""


@dataclass(frozen=True)
class MeasuredScale:
    """The reduction a running loss applies. Scaling: per routing decision; `relative` is 1 for the token-layer mean."""

    coef: float
    """The nominal λ_R whose effect was measured."""
    target: float | None
    """c_R, fitted or given; None when nothing is applied."""
    absolute_per_layer: tuple[float, ...]
    """λ_R·α_l of a counted decision."""
    relative: float
    """s_rel against the token-layer mean over counted decisions, mean over decisions."""
    relative_all: float
    """s_rel against the token-layer mean over all decisions, masked ones included: the reading of a code that counts
    padding. Equal to `relative` without a mask."""
    relative_per_layer: tuple[float, ...]
    """s_rel of every layer."""
    padding_ratio: float | None
    """Coefficient on a masked decision over that on a counted one: 1 when padding is counted, 0 when it is not; None
    without a mask."""
    residual: float
    """‖measured − explained‖ / ‖measured‖: near 0 when a weighted squared log-normalizer explains the gradient."""

    @property
    def absolute(self) -> float:
        """λ_R·α, mean over layers."""
        return sum(self.absolute_per_layer) / len(self.absolute_per_layer)


@dataclass(frozen=True)
class RouterFindings:
    """What an audit says about a model's routers; None where a number does not exist, with the reason in `reasons`."""

    scoring: Scoring
    """How a router scores its experts."""
    softmax_normalizer: bool | None
    """Whether log Z_R normalizes what the router uses; None where its code and configuration do not tell."""
    layers: int
    """Routers found, L."""
    model_layers: int | None
    """Blocks of the model, dense ones included."""
    experts: int
    """Experts per router, E."""
    top_k: int
    """Experts per token, k."""
    decisions: int
    """Counted routing decisions over all batches."""
    nonfinite: int
    """Decisions with a nonfinite log Z_R, left out of every number."""
    coef: float
    """λ_R of the diagnostic reduction."""
    convention: str
    """Name of the diagnostic reduction."""
    target: float | None
    """c_R."""
    absolute: float | None
    """λ_R·α of one decision of the first batch under `convention`."""
    relative: float | None
    """s_rel of `convention` for this model."""
    log_z: RouterTail | None
    """log Z_R."""
    violation: RouterTail | None
    """|log Z_R − c_R|."""
    entropy: float | None
    """Mean over decisions, in nats; log E at most."""
    load_cv: float | None
    """Mean over layers, load pooled over batches."""
    correction_norm: float | None
    """Mean ‖λα·2(log Z − c)·W_Rᵀp‖₂ over decisions of the batches."""
    per_layer: tuple[RouterLayer, ...]
    """Every router."""
    applied: MeasuredScale | None
    """What the model's own router Z-loss applies, measured from gradients."""
    reasons: tuple[str, ...]
    """Why numbers are missing."""
