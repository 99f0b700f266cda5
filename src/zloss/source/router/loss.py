"""Router Z-loss: source, reduction weight and convention kept apart (paper eq:router_loss).

    L_R = λ_R Σ_{t,l} α_l (log Z_R − c_R)²        ∂L_R/∂r = λ_R α_l · 2(log Z_R − c_R) · p

The source 2(log Z − c)·p is the head's, with E experts for V words; the convention only sets α.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zloss.errors import DoubleBackwardError, InputError, ShapeError
from zloss.objectives import StandardZLoss, check_target, is_on, resolve_target
from zloss.ranks.global_normalizer import Gradients
from zloss.source.router.catalog import find_convention
from zloss.source.router.convention import RouterContext, RouterConvention, check_count, exact_coefficient
from zloss.source.router.decisions import LayerTensors, read_router_logits, tensor_sequence
from zloss.source.router.layer_weights import counted_decisions, layer_weights
from zloss.source.router.loss_record import RouterLoss as RouterLoss
from zloss.source.router.statistics import RouterStats, router_statistics
from zloss.tensors import at_least_fp32, check_differentiable, check_holds_values


def router_loss(
    router_logits: LayerTensors,
    *,
    coef: float | None,
    convention: str | RouterConvention,
    top_k: int,
    target: float | None = None,
    mask: LayerTensors | None = None,
    weight: LayerTensors | None = None,
    capacity: int | None = None,
    normalizer: float | Tensor | None = None,
    context: RouterContext | None = None,
    groups: dist.ProcessGroup | Iterable[dist.ProcessGroup] | None = None,
    gradients: Gradients | int = "averaged",
) -> RouterLoss:
    """λ_R Σ α (log Z_R − c_R)² under a named convention, with the record of what it applies.

    `router_logits`: one [T, E] tensor per layer, or [L, T, E], before the softmax. `mask` ([T], [L, T] or one [T] per
    layer, True = counted) takes padding out of numerator and denominator. `target=None` is c_R = log E. `weight` (one
    [E, D] per layer) adds the correction norm, `capacity` (routes per expert and layer) the dropped-route fraction.
    `normalizer` replaces each layer's token count N_l: the tokens of all micro-batches or ranks. `groups`: the process
    groups over which the decisions are split (data, expert, sequence); N_l is then counted over all their ranks in one
    all-reduce of L numbers, and `gradients` says what the framework does with the ranks' gradients, as for
    `zloss.global_normalizer`. `context.valid_tokens` is a count over all ranks.

    Scaling: whatever the convention says; see `relative`. Statistics are those of this rank.

    >>> r = torch.zeros(2, 5, 8, requires_grad=True)
    >>> out = router_loss(r, coef=1e-3, convention="active_route_mean", top_k=4, target=0.0)
    >>> out.relative, round(out.loss.item() / (1e-3 * math.log(8) ** 2), 6)
    (0.25, 0.25)
    """
    context = RouterContext() if context is None else context
    found, exact = find_convention(convention), exact_coefficient(coef)
    check_target("target", target)
    decisions = read_router_logits(router_logits, mask, two_stacks=context.encoder_layers is not None)
    check_top_k(top_k, decisions.experts)
    if capacity is not None:
        check_count("capacity", capacity)
    c = resolve_target(target, decisions.experts)
    with torch.no_grad(), torch.autocast(decisions.logits_NE.device.type, enabled=False):
        stats = router_statistics(decisions, top_k)
        counted_L, divisor = counted_decisions(stats.decisions_per_layer, normalizer, groups, gradients)
        weights = layer_weights(found, counted_L, top_k, context)
        absolute_L = weights.absolute(exact)
        penalty_N, source = StandardZLoss(1.0, c).source(stats.tokens)
        # `where` and not a factor 0: 0·NaN of a masked decision, or of a coefficient that is off, would be NaN.
        counted_N = stats.valid if is_on(coef) else torch.zeros_like(stats.valid)
        value_N = torch.where(counted_N, penalty_N, 0)
        along_p_N = torch.where(counted_N, source.a, 0)
        lambda_alpha_L = absolute_L.to(value_N)
        applied_L = lambda_alpha_L if divisor == 1 else (absolute_L * divisor).to(value_N)
        per_layer = decisions.sum_per_layer(value_N) * applied_L
        applied_N = decisions.spread(applied_L)
        absolute_N = decisions.spread(lambda_alpha_L)
        correction_L = None if weight is None else _correction_norm(stats, absolute_N * along_p_N, weight)
    return RouterLoss(
        loss=_attach(per_layer.sum(), along_p_N, applied_N, stats),
        per_layer=per_layer,
        alpha_per_layer=weights.alpha_L,
        absolute_per_layer=absolute_L,
        relative_per_layer=weights.relative_L,
        coef=float(exact),
        target=c,
        top_k=top_k,
        convention=found,
        stats=stats,
        correction_norm_per_layer=correction_L,
        dropped_per_layer=None if capacity is None else stats.dropped_per_layer(capacity),
    )


def check_top_k(top_k: int, experts: int) -> None:
    """1 ≤ k ≤ E."""
    check_count("top_k", top_k)
    if top_k > experts:
        raise InputError(f"`top_k` is expected to be at most the number of experts, E = {experts}, but got {top_k}.")


def _correction_norm(stats: RouterStats, along_p_N: Tensor, weight: LayerTensors) -> Tensor:
    """Mean over decisions of ‖λα·2(log Z − c)·W_Rᵀp‖₂, [L]."""
    decisions = stats.decisions
    weights = tensor_sequence("weight", weight, dims=2)
    shapes = [list(w.shape) for w in weights]
    if len(weights) != decisions.layers or any(w.ndim != 2 or w.shape[0] != decisions.experts for w in weights):
        raise ShapeError(
            f"`weight` is expected to be one [E, D] router weight per layer with L = {decisions.layers} and E = "
            f"{decisions.experts}, but got {shapes}. A [D, E] weight must be transposed."
        )
    for w_ED in weights:
        check_holds_values(weight=w_ED)
    norms = [
        (p_TE @ at_least_fp32(w_ED.detach()).to(p_TE)).norm(dim=1)
        for p_TE, w_ED in zip(stats.p_NE.split_with_sizes(list(decisions.tokens)), weights, strict=True)
    ]
    return stats.mean_per_layer(along_p_N.abs() * torch.cat(norms))


class _Source(torch.autograd.Function):
    """A scalar whose gradient at the router logits is applied · along_p · p, formed only when it is asked for.

    `applied_N` is λα of every decision, times the divisor of the gradients over ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, along_p_N: Tensor, applied_N: Tensor, p_NE: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(along_p_N, applied_N, p_NE)
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "router_loss has first derivatives only, but backward was called with create_graph=True."
            )
        along_p_N, applied_N, p_NE = ctx.saved_tensors
        # The factor λα last, as in the value; `where` because a masked decision may hold NaN probabilities, and 0 · NaN is not 0.
        source_NE = along_p_N.unsqueeze(1) * p_NE * applied_N.unsqueeze(1)
        source_NE = grad * torch.where((along_p_N == 0).unsqueeze(1), 0, source_NE)
        parts = source_NE.split_with_sizes([math.prod(shape[:-1]) for shape, _ in ctx.like])
        grads = (part.view(shape).to(dtype) for part, (shape, dtype) in zip(parts, ctx.like, strict=True))
        return (None, None, None, None, *grads)


def _attach(value: Tensor, along_p_N: Tensor, applied_N: Tensor, stats: RouterStats) -> Tensor:
    """The value, differentiable at the logits it came from."""
    tensors = stats.decisions.tensors
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return value
    check_differentiable(**{f"router_logits[{i}]": tensor for i, tensor in enumerate(tensors)})
    attach: Callable[..., Tensor] = _Source.apply
    return attach(value, along_p_N, applied_N, stats.p_NE, *tensors)
