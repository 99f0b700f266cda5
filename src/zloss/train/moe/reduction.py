"""The paper's router reductions as they are written down: violations summed, replicas gathered, routes counted.

    token-layer mean     λ (1/N_tl) Σ φ                    prop:router_effective_coefficient
    active-route mean    λ (1/R) Σ φ, R active routes      cor:router_topk_active_mean
    active-route sum     λ (1/N_tl) Σ over routes of φ     cor:router_topk_active_sum

φ = (log Z_R − c_R)² of one decision. Nothing here knows of α, k or s_rel: that matched coefficients train alike is then
measured, not assumed. `zloss.router_loss` computes the same losses with a factor α, which is faster;
`tests/train/moe/test_reduction.py` compares the two.

Scaling: denominators are those of the whole optimizer step, so that the parts of its micro-batches add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.errors import UnknownNameError
from zloss.results.moe_config import PAPER_CONVENTIONS
from zloss.tensors import at_least_fp32
from zloss.train.moe.routing import Routing


def reduced_router_loss(routing: Routing, *, convention: str, coef: float, target: float, step_tokens: int) -> Tensor:
    """λ_R times the reduced violations of one forward pass, as its part of a step of `step_tokens` tokens."""
    violations = [_violation(logits_TE, target) for logits_TE in routing.logits]
    # Active routes of every layer, one entry each: the token it belongs to.
    owners = [_owners(chosen_TK) for chosen_TK in routing.chosen]
    passes = step_tokens / routing.tokens
    decisions = passes * sum(violation_T.numel() for violation_T in violations)
    routes = passes * sum(owner_R.numel() for owner_R in owners)
    if convention == "token_layer_mean":
        return coef * (_total(violations) / decisions)
    if convention == "active_route_mean":
        return coef * (_total(violations) / routes)
    if convention == "active_route_sum":
        replicas = [violation_T[owner_R] for violation_T, owner_R in zip(violations, owners, strict=True)]
        return coef * (_total(replicas) / decisions)
    raise UnknownNameError("router convention", convention, PAPER_CONVENTIONS)


def _violation(logits_TE: Tensor, target: float) -> Tensor:
    """φ [T] of every decision of a layer."""
    return (torch.logsumexp(at_least_fp32(logits_TE), dim=1) - target).square()


def _owners(chosen_TK: Tensor) -> Tensor:
    """The token of every active route of a layer, [T·K]."""
    tokens = torch.arange(chosen_TK.shape[0], device=chosen_TK.device)
    return tokens.unsqueeze(1).expand_as(chosen_TK).reshape(-1)


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.sum() for part in parts]).sum()
