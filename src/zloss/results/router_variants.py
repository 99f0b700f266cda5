"""The router losses of compared mixture-of-experts runs, as `comparison.json` has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from zloss.results.record import written_with


@dataclass(frozen=True)
class RouterVariant:
    """One router loss: its scale and what its routers did; lists are by seed."""

    convention: str
    """Name of the variant."""
    coef: float | None
    """Nominal λ_R."""
    applied_coef: float | None = None
    """λ_R after matching."""
    s_rel: float | None = None
    """Scale relative to the token-layer mean."""
    absolute: float | None = None
    """λ_R·α per routing decision."""
    seeds: tuple[int, ...] = ()
    """Seeds of the lists below."""
    ce: tuple[float | None, ...] = ()
    """Validation cross-entropy."""
    entropy: tuple[float | None, ...] = ()
    """Router entropy on the validation blocks, in nats."""
    load_cv: tuple[float | None, ...] = ()
    """Coefficient of variation of the expert load on the validation blocks."""
    load_balance: tuple[float | None, ...] = ()
    """The model's own load-balancing term."""
    max_loss_difference: tuple[float | None, ...] = ()
    """Largest |ΔL| from the baseline over all steps, by pair."""
    first_difference: tuple[int | None, ...] = ()
    """First step that differs from the baseline, by pair."""


@dataclass(frozen=True)
class RouterVariants:
    """The router losses of compared mixture-of-experts runs."""

    baseline: str
    """Name of the baseline variant."""
    conventions: tuple[RouterVariant, ...]
    """Variants with a router Z-loss."""
    off: tuple[RouterVariant, ...] = ()
    """The variant without one."""
    top_k: int | None = field(default=None, metadata=written_with("top_k"))
    """Experts k per token in every run; absent from files before it was kept."""
    decisions: int | None = field(default=None, metadata=written_with("decisions"))
    """N_tl: routing decisions of a training step, tokens times layers; absent from files before it was kept."""
