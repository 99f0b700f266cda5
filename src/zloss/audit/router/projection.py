"""The paper's router projection audit: one seeded linear router on hidden states, top-k × convention (tab:router).

The hidden states are the same for every line; only the reduction changes, so within one k the norms of the token-layer
mean, the active-route mean and the active-route sum stand in the ratio 1 : 1/k : k. This ratio does not depend on the
router's scale, c_R, the hidden states or the number of decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.errors import ShapeError
from zloss.results.moe_config import PAPER_CONVENTIONS
from zloss.source.router.convention import RouterConvention
from zloss.source.router.loss import router_loss
from zloss.tensors import at_least_fp32


@dataclass(frozen=True)
class ProjectedCorrection:
    """What one convention injects into the hidden states at one k: a line of tab:router."""

    top_k: int
    convention: str
    relative: float
    """s_rel: the coefficient of a decision in units of that of the token-layer mean."""
    correction_norm: float
    """Mean over decisions of ‖λα·2(log Z − c)·W_Rᵀp‖₂, α included."""


def seeded_router(experts: int, width: int, *, seed: int, init_std: float, dtype: torch.dtype) -> Tensor:
    """W_R [E, D] with N(0, init_std²) entries, drawn on the CPU in fp64: the same router on every device and dtype."""
    generator = torch.Generator().manual_seed(seed)
    return (init_std * torch.randn(experts, width, generator=generator, dtype=torch.float64)).to(dtype)


def router_projection(
    hidden: Tensor,
    *,
    experts: int = 16,
    top_ks: Sequence[int] = (1, 2, 4),
    conventions: Sequence[str | RouterConvention] = PAPER_CONVENTIONS,
    coef: float = 1e-3,
    target: float | None = None,
    init_std: float = 0.02,
    seed: int = 0,
) -> tuple[ProjectedCorrection, ...]:
    """The nine lines of tab:router for `hidden` [T, D], k by k.

    The router of each k has its own seed, `seed + k`, because the paper's routers differ from k to k; norms are comparable
    within one k only. `target` is c_R; None is log E. Scaling: α = s_rel / T, so the norms fall as 1/T.
    """
    if hidden.ndim != 2:
        raise ShapeError(
            f"`hidden` is expected to be [T, D], but got {list(hidden.shape)}: flatten batch and sequence."
        )
    h_TD = at_least_fp32(hidden.detach())
    found = []
    for top_k in top_ks:
        w_ED = seeded_router(experts, h_TD.shape[1], seed=seed + top_k, init_std=init_std, dtype=h_TD.dtype)
        w_ED = w_ED.to(h_TD.device)
        with torch.autocast(h_TD.device.type, enabled=False):
            logits_TE = h_TD @ w_ED.T
        for convention in conventions:
            out = router_loss(logits_TE, coef=coef, convention=convention, top_k=top_k, target=target, weight=w_ED)
            assert out.correction_norm is not None  # the weight was given
            found.append(ProjectedCorrection(top_k, out.convention.name, out.relative, float(out.correction_norm)))
    return tuple(found)
