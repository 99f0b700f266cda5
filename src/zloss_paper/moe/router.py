"""tab:router: router Z-loss conventions for a seeded 16-expert linear router on a model's hidden states.

The paper states E = 16, k ∈ {1, 2, 4}, λ_R = 1e-3 and one deterministic router per k. It does not state the router's
initial scale, c_R, the hidden state taken or the number of decisions: ours are N(0, 0.02²), log E, the caller's choice
and the rows of `hidden`. The norms' ratios within one k depend on none of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zloss.audit.router.projection import ProjectionRow, router_projection


@dataclass(frozen=True)
class RouterTableConfig:
    """The complete setting of tab:router."""

    experts: int = 16
    top_ks: tuple[int, ...] = (1, 2, 4)
    coef: float = 1e-3
    target: float | None = None
    init_std: float = 0.02
    seed: int = 0


def router_table(hidden: Tensor, config: RouterTableConfig | None = None) -> tuple[ProjectionRow, ...]:
    """The nine rows of tab:router for hidden states [T, D]."""
    config = RouterTableConfig() if config is None else config
    return router_projection(
        hidden,
        experts=config.experts,
        top_ks=config.top_ks,
        coef=config.coef,
        target=config.target,
        init_std=config.init_std,
        seed=config.seed,
    )
