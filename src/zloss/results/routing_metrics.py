"""The keys that a run with experts adds to metrics.json: its routers on the validation blocks, and their loss's scale."""

from __future__ import annotations

from dataclasses import dataclass, field

from zloss.results.record import NATS, NOT_NEGATIVE, SHARE, within, written_with


@dataclass(frozen=True, kw_only=True)
class RouterLayers:
    """The trained router variant, and its routing layer by layer."""

    variant: str
    """The router variant: `none`, a convention, or `convention:matched`."""
    convention: str | None
    """The convention of its reduction; None for `none`."""
    coef: float = field(metadata=NOT_NEGATIVE)
    """λ_R as written."""
    applied_coef: float = field(metadata=NOT_NEGATIVE)
    """λ_R as the loss used it: converted for a matched variant, else as written."""
    load_balance_coef: float = field(metadata=NOT_NEGATIVE)
    """Coefficient of the model's own load-balancing term."""
    entropy_per_layer: tuple[float | None, ...] = field(metadata=NATS)
    """Mean routing entropy of each layer, in nats per decision [L]."""
    load_cv_per_layer: tuple[float | None, ...] = field(metadata=NOT_NEGATIVE)
    """Population standard deviation over mean of the routes per expert, for each layer [L]."""
    load: tuple[tuple[float, ...], ...] = field(metadata=NOT_NEGATIVE)
    """Routes that each expert received on the validation blocks [L, E]."""
    top_k: int | None = field(default=None, metadata={**written_with("top_k"), **within(1)})
    """Experts k per token; absent from files before it was kept."""
    decisions: int | None = field(default=None, metadata={**written_with("decisions"), **within(1)})
    """N_tl: routing decisions of a training step, tokens times layers; absent from files before it was kept."""


@dataclass(frozen=True, kw_only=True)
class RoutingMetrics:
    """Routing of the trained model over the validation blocks; means are over tokens and layers unless a key says else."""

    entropy: float | None = field(metadata=NATS)
    """Mean routing entropy, in nats."""
    load_cv: float | None = field(metadata=NOT_NEGATIVE)
    """Mean over layers of the coefficient of variation of the load."""
    s_rel: float = field(metadata=NOT_NEGATIVE)
    """Coefficient of one routing decision in units of λ_R/N_tl, from the convention: 1 for the token-layer mean, 0 when off."""
    router_absolute: float = field(metadata=NOT_NEGATIVE)
    """λ_R·α of one routing decision in a training step."""
    router_correction_norm: float | None = field(metadata=NOT_NEGATIVE)
    """Mean ‖λ_R α·2(log Z − c)·W_Rᵀp‖₂: the correction that reaches the hidden state, per decision."""
    router_log_z_p99: float | None
    """p99 of the router's log Z over decisions."""
    router_log_z_p999: float | None
    """p99.9 of the router's log Z over decisions."""
    router_log_z_max: float | None
    """Largest log Z of a router."""
    load_balance: float | None = field(metadata=NOT_NEGATIVE)
    """The model's own load-balancing term before its coefficient; about k at balance."""
    router_z: float | None = field(metadata=NOT_NEGATIVE)
    """The router Z-loss in nats per token: s_rel·λ_R times the mean squared violation."""
    dropped_routes: float | None = field(metadata=SHARE)
    """Fraction of routes that the model did not take."""
    over_capacity: float | None = field(metadata=SHARE)
    """Fraction of routes beyond the capacity factor, counted and not dropped; None without a capacity factor."""
    router: RouterLayers
    """The variant, and the routing of each layer."""
