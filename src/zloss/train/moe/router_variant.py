"""What the router variant of a run applies to one decision.

Scaling: N_tl decisions (tokens times layers) of one optimizer step; λ_R as written in the configuration.
"""

from __future__ import annotations

import math

from zloss.results.moe_config import REFERENCE, MoeRun
from zloss.router.conventions import match_coefficient, router_scale


def applied_coef(moe: MoeRun) -> float:
    """λ_R as the loss uses it: as written, or converted so that a decision gets what the token-layer mean gives it."""
    if moe.convention is None or not moe.matched:
        return moe.router_coef
    return match_coefficient(moe.router_coef, REFERENCE, moe.convention, layers=moe.layers, top_k=moe.top_k)


def relative_scale(moe: MoeRun) -> float:
    """s_rel: the coefficient of a decision in units of λ_R/N_tl as written; 0 when off, 1 for a matched variant."""
    if moe.convention is None or not moe.router_coef:
        return 0.0
    scale = router_scale(moe.convention, layers=moe.layers, tokens=1, top_k=moe.top_k, coef=applied_coef(moe))
    reference = router_scale(REFERENCE, layers=moe.layers, tokens=1, top_k=moe.top_k, coef=moe.router_coef)
    return scale.absolute / reference.absolute


def absolute_coef(moe: MoeRun, tokens: int) -> float:
    """λ_R·α of one decision in a step of `tokens` tokens."""
    if moe.convention is None:
        return 0.0
    return router_scale(
        moe.convention, layers=moe.layers, tokens=tokens, top_k=moe.top_k, coef=applied_coef(moe)
    ).absolute


def router_target(moe: MoeRun) -> float:
    """c_R: as set, or log E."""
    return math.log(moe.experts) if moe.router_target is None else moe.router_target


def expert_capacity(moe: MoeRun, tokens: int) -> int | None:
    """Routes that an expert takes of a pass of `tokens` tokens before further ones count as beyond its capacity."""
    if moe.capacity_factor is None:
        return None
    return max(1, math.ceil(moe.capacity_factor * tokens * moe.top_k / moe.experts))
