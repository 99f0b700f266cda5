"""The router Z-loss, and what it applies to each routing decision (paper eq:router_loss).

    L_R = λ_R Σ_{t,l} α_l (log Z_R − c_R)²        ∂L_R/∂r = λ_R α_l · 2(log Z_R − c_R) · p

The source 2(log Z − c)·p is that of the output head, with E experts instead of V tokens; the convention only sets α.

From top to bottom: the loss and its record; α of every layer; the routing decisions of a forward pass, checked; their
statistics (log-normalizer, entropy, expert load), which are means over counted decisions.

Axes: L layers, T tokens of a layer, E experts, K active routes, N decisions (all layers, one after the other).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zloss.distributed import Gradients, as_groups, gradient_divisor
from zloss.errors import DeviceError, DoubleBackwardError, DtypeError, InputError, ShapeError
from zloss.objectives import StandardZLoss, check_target, is_on, resolve_target
from zloss.router.conventions import RouterContext, RouterConvention, check_count, exact_coefficient, find_convention
from zloss.statistics import TokenStats
from zloss.tensors import (
    as_denominator,
    at_least_fp32,
    check_differentiable,
    check_holds_values,
    check_mask,
    check_tensor,
)

LayerTensors = Tensor | Sequence[Tensor]
"""One [T, E] tensor per layer, an [L, T, E] tensor, or [T, E] for a single layer."""


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
    """λ_R Σ α (log Z_R − c_R)² under a named convention, with a record of what it applies.

    `router_logits`: one [T, E] tensor per layer, or [L, T, E], before the softmax. `mask` ([T], [L, T] or one [T] per
    layer, True = counted) removes padding from numerator and denominator. `target=None` is c_R = log E. `weight` (one
    [E, D] per layer) adds the correction norm, `capacity` (routes per expert and layer) the dropped-route fraction.
    `normalizer` replaces each layer's token count N_l, for example by the tokens of all micro-batches or ranks. `groups`: the
    process groups over which the decisions are split (data, expert, sequence); N_l is then counted over all their ranks in
    one all-reduce of L numbers, and `gradients` says what the framework does with the ranks' gradients, as for
    `zloss.global_normalizer`. `context.valid_tokens` is a count over all ranks.

    Scaling: set by the convention; see `relative`. Statistics cover this rank only.

    >>> r = torch.zeros(2, 5, 8, requires_grad=True)
    >>> out = router_loss(r, coef=1e-3, convention="active_route_mean", top_k=4, target=0.0)
    >>> out.relative, round(out.loss.item() / (1e-3 * math.log(8) ** 2), 6)
    (0.25, 0.25)
    """
    context = RouterContext() if context is None else context
    if not isinstance(context, RouterContext):
        raise DtypeError(f"`context` is expected to be a RouterContext, but got {type(context).__name__}.")
    found, exact = find_convention(convention), exact_coefficient(coef)
    check_target("target", target)
    decisions = read_router_logits(router_logits, mask, two_stacks=context.encoder_layers is not None)
    check_count("top_k", top_k)
    if top_k > decisions.experts:
        raise InputError(
            f"`top_k` is expected to be at most the number of experts, E = {decisions.experts}, but got {top_k}."
        )
    if capacity is not None:
        check_count("capacity", capacity)
    c = resolve_target(target, decisions.experts)
    with torch.no_grad(), torch.autocast(decisions.logits_NE.device.type, enabled=False):
        stats = router_statistics(decisions, top_k)
        counted_L, divisor = _counted_decisions(stats.decisions_per_layer, normalizer, groups, gradients)
        alpha_L, absolute_L, relative_L = _layer_weights(found, exact, counted_L, top_k, context)
        penalty_N, source = StandardZLoss(1.0, c).source(stats.tokens)
        # `where` and not a factor 0: 0·NaN is NaN, for a masked decision or with the coefficient off.
        counted_N = stats.valid if is_on(coef) else torch.zeros_like(stats.valid)
        value_N = torch.where(counted_N, penalty_N, 0)
        along_p_N = torch.where(counted_N, source.a, 0)
        lambda_alpha_L = absolute_L.to(value_N)
        applied_L = lambda_alpha_L if divisor == 1 else (absolute_L * divisor).to(value_N)
        per_layer = decisions.sum_per_layer(value_N) * applied_L
        correction_L = dropped_L = None
        if weight is not None:
            correction_L = _correction_norm(stats, lambda_alpha_L[decisions.layer_N] * along_p_N, weight)
        if capacity is not None:  # whichever of the routes beyond it are dropped
            dropped_L = (stats.load - capacity).clamp_min(0).sum(dim=1) / stats.load.sum(dim=1)
    loss = per_layer.sum()
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in decisions.tensors):
        check_differentiable(**{f"router_logits[{i}]": tensor for i, tensor in enumerate(decisions.tensors)})
        attach: Callable[..., Tensor] = _Source.apply
        loss = attach(loss, along_p_N, applied_L[decisions.layer_N], stats.p_NE, *decisions.tensors)
    return RouterLoss(
        loss=loss,
        per_layer=per_layer,
        alpha_per_layer=alpha_L,
        absolute_per_layer=absolute_L,
        relative_per_layer=relative_L,
        coef=float(exact),
        target=c,
        top_k=top_k,
        convention=found,
        stats=stats,
        correction_norm_per_layer=correction_L,
        dropped_per_layer=dropped_L,
    )


@dataclass(frozen=True)
class RouterLoss:
    """The router Z-loss of one forward pass, with what it applies to each decision. Only `loss` carries a gradient."""

    loss: Tensor
    """λ Σ α (log Z − c)²; 0 when off or when nothing is counted. With `groups` this rank's part times the divisor of the
    gradients, so the loss of all decisions is its mean over ranks if gradients are averaged and its sum if they are summed."""
    per_layer: Tensor
    """Each layer's part of `loss`, [L]."""
    alpha_per_layer: Tensor
    """α_l, fp64 [L]; 0 for a layer without counted tokens. With `groups`, decisions are counted over all ranks."""
    absolute_per_layer: Tensor
    """λ_R·α_l, fp64 [L]."""
    relative_per_layer: Tensor
    """s_rel = N_tl·α_l, fp64 [L]."""
    coef: float
    """λ_R; 0 when off."""
    target: float
    """c_R."""
    top_k: int
    convention: RouterConvention
    stats: RouterStats = field(repr=False)
    correction_norm_per_layer: Tensor | None = None
    """Mean ‖δ_h‖₂ = ‖λα·2(log Z − c)·W_Rᵀp‖₂ over each layer's decisions, [L]; None without the router weight."""
    dropped_per_layer: Tensor | None = None
    """Fraction of active routes beyond the capacity, [L]; None without a capacity."""

    @property
    def alpha(self) -> float:
        """α; the mean over decisions if layers differ."""
        return self._over_decisions(self.alpha_per_layer)

    @property
    def absolute(self) -> float:
        """λ_R·α, the coefficient of one decision."""
        return self._over_decisions(self.absolute_per_layer)

    @property
    def relative(self) -> float:
        """s_rel, 1 for the token-layer mean."""
        return self._over_decisions(self.relative_per_layer)

    @property
    def entropy(self) -> Tensor:
        """Mean router entropy over counted decisions, in nats."""
        return torch.where(self.stats.valid, self.stats.entropy_N, 0).sum() / self.stats.valid.sum()

    @property
    def load(self) -> Tensor:
        """[L, E]: active routes per expert."""
        return self.stats.load

    @property
    def load_cv(self) -> Tensor:
        """Mean over layers of std_e(load) / mean_e(load); taken per layer, so imbalances of two layers cannot cancel."""
        return (self.load.std(dim=1, correction=0) / self.load.mean(dim=1)).nanmean()

    @property
    def decisions(self) -> int:
        """N_tl, the counted routing decisions of this call."""
        return int(self.stats.valid.sum())

    @property
    def nonfinite(self) -> int:
        """Counted decisions whose log Z is NaN or infinite."""
        return int((~torch.isfinite(self.stats.log_z) & self.stats.valid).sum())

    @property
    def correction_norm(self) -> Tensor | None:
        """Mean ‖δ_h‖₂ over counted decisions."""
        return _mean_over_layers(self.correction_norm_per_layer, self.stats.decisions_per_layer)

    @property
    def dropped(self) -> Tensor | None:
        """Fraction of all active routes beyond the capacity."""
        return _mean_over_layers(self.dropped_per_layer, self.load.sum(dim=1))

    def _over_decisions(self, values_L: Tensor) -> float:
        count_L = self.stats.decisions_per_layer
        used = values_L[count_L > 0]
        if used.numel() == 0:
            return 0.0
        if bool((used == used[0]).all()):
            return float(used[0])
        return float((values_L * count_L).sum() / count_L.sum())


def _mean_over_layers(values_L: Tensor | None, weight_L: Tensor) -> Tensor | None:
    """Σ weight·value / Σ weight; the value of a layer with weight 0 is NaN and left out."""
    if values_L is None:
        return None
    weight_L = weight_L.to(values_L)
    return torch.where(weight_L > 0, values_L * weight_L, 0).sum() / weight_L.sum()


class _Source(torch.autograd.Function):
    """A scalar whose gradient at the router logits is applied · along_p · p, formed only in the backward pass.

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
        # The factor λα last, as in the value; `where`, because a masked decision may have NaN probabilities and 0·NaN is NaN.
        source_NE = along_p_N.unsqueeze(1) * p_NE * applied_N.unsqueeze(1)
        source_NE = grad * torch.where((along_p_N == 0).unsqueeze(1), 0, source_NE)
        parts = source_NE.split_with_sizes([math.prod(shape[:-1]) for shape, _ in ctx.like])
        grads = (part.view(shape).to(dtype) for part, (shape, dtype) in zip(parts, ctx.like, strict=True))
        return (None, None, None, None, *grads)


def _counted_decisions(
    local_L: Tensor,
    normalizer: float | Tensor | None,
    groups: dist.ProcessGroup | Iterable[dist.ProcessGroup] | None,
    gradients: Gradients | int,
) -> tuple[Tensor, int]:
    """(decisions of every layer that the loss is divided by, number by which the framework divides summed gradients)."""
    if normalizer is not None:
        if groups is not None:
            raise InputError("`normalizer` and `groups` both define what is counted: pass one of them.")
        return as_denominator(normalizer, local_L).expand_as(local_L), 1
    if groups is None:
        return local_L, 1
    all_groups, whole_L = as_groups(groups), local_L.clone()
    for group in all_groups:
        dist.all_reduce(whole_L, dist.ReduceOp.SUM, group=group)
    return whole_L, gradient_divisor(gradients, all_groups)


def _layer_weights(
    convention: RouterConvention, coef: Fraction, counted_L: Tensor, top_k: int, context: RouterContext
) -> tuple[Tensor, Tensor, Tensor]:
    """(α_l, λα_l, s_rel) of layers with `counted_L` decisions each, fp64, from counts that stay on their device.

    Layers with a count of 0 get α = 0.
    """
    total = counted_L.sum()
    if convention.token_count == "decisions":
        count_L = total.expand_as(counted_L)
    elif convention.token_count == "valid_tokens" and context.valid_tokens is not None:
        count_L = torch.full_like(counted_L, context.valid_tokens)
    else:
        count_L = counted_L
    numerators = convention.numerators(len(counted_L), top_k, context)
    alpha_L = _over(_fp64(numerators, counted_L), count_L)
    # One rounding of the exact λ·c_l, so matched coefficients give the same bits.
    absolute_L = _over(_fp64([coef * c_l for c_l in numerators], counted_L), count_L)
    # Numerator and denominator of c_l separately: N_tl / D_l is usually a whole number, so s_rel is exact.
    top_L = _fp64([Fraction(c_l.numerator) for c_l in numerators], counted_L)
    bottom_L = _fp64([Fraction(c_l.denominator) for c_l in numerators], counted_L)
    relative_L = top_L * _over(total.expand_as(count_L), count_L) / bottom_L
    return alpha_L, absolute_L, relative_L


def _fp64(values: Sequence[Fraction], like: Tensor) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64, device=like.device)


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, or 0 if nothing is counted."""
    return torch.where(denominator == 0, 0.0, numerator / torch.where(denominator == 0, 1.0, denominator))


def _correction_norm(stats: RouterStats, along_p_N: Tensor, weight: LayerTensors) -> Tensor:
    """Mean over decisions of ‖λα·2(log Z − c)·W_Rᵀp‖₂, [L]."""
    decisions = stats.decisions
    weights = _tensor_sequence("weight", weight, dims=2)
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


@dataclass(frozen=True)
class RouterDecisions:
    """Every routing decision of a forward pass."""

    tensors: tuple[Tensor, ...]
    """The caller's tensors, which receive the gradient."""
    tokens: tuple[int, ...]
    """T of every layer, masked tokens included."""
    logits_NE: Tensor
    """Detached, fp32 (fp64 for fp64), layer after layer."""
    valid_N: Tensor
    """True for decisions that are counted."""
    layer_N: Tensor
    """The layer of every decision."""

    @property
    def layers(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.logits_NE.shape[1]

    def sum_per_layer(self, values_N: Tensor) -> Tensor:
        """Σ over the decisions of each layer, [L]."""
        if len(set(self.tokens)) == 1:
            return values_N.view(self.layers, self.tokens[0]).sum(dim=1)
        return torch.stack([part.sum() for part in values_N.split_with_sizes(list(self.tokens))])


def read_router_logits(router_logits: LayerTensors, mask: LayerTensors | None, *, two_stacks: bool) -> RouterDecisions:
    """Check the layers against each other and the mask against the layers."""
    layers = _tensor_sequence("router_logits", router_logits, dims=2)
    if not layers:
        raise InputError("`router_logits` has no layers: the model returned no router logits.")
    for index, layer in enumerate(layers):
        if layer.ndim != 2:
            raise ShapeError(
                f"`router_logits` is expected to be [T, E], [L, T, E] or a sequence of [T, E], but layer {index} is "
                f"{list(layer.shape)}: flatten batch and sequence with `.flatten(0, -2)`."
            )
        check_holds_values(router_logits=layer)
        (tokens, experts), (first_tokens, first_experts) = layer.shape, layers[0].shape
        if experts == 0:
            raise ShapeError(f"layer {index} of `router_logits` has no experts: shape {list(layer.shape)}.")
        if experts != first_experts:
            raise ShapeError(
                f"every layer of `router_logits` is expected to have E = {first_experts} experts, like layer 0, but layer "
                f"{index} has shape {list(layer.shape)}."
            )
        if tokens != first_tokens and not two_stacks:
            raise ShapeError(
                f"every layer of `router_logits` is expected to have T = {first_tokens} tokens, like layer 0, but layer "
                f"{index} has {tokens}. For an encoder-decoder, pass `context=RouterContext(encoder_layers=...)`."
            )
        if layer.device != layers[0].device:
            raise DeviceError(
                f"layers of `router_logits` are expected on one device, but layer 0 is on {layers[0].device} and layer "
                f"{index} on {layer.device}: move them with `.to(...)`."
            )
        if not layer.is_floating_point():
            raise DtypeError(f"`router_logits` are expected to be floating point, but layer {index} is {layer.dtype}.")
    counts = tuple(layer.shape[0] for layer in layers)
    with torch.no_grad():
        logits_NE = torch.cat([at_least_fp32(layer.detach()) for layer in layers])
        sizes = torch.tensor(counts, device=logits_NE.device)
        layer_N = torch.repeat_interleave(sizes, output_size=sum(counts))
        valid_N = _mask(mask, counts, logits_NE.device)
    tensors = (router_logits,) if isinstance(router_logits, Tensor) else layers
    return RouterDecisions(tensors, counts, logits_NE, valid_N, layer_N)


def _tensor_sequence(name: str, value: object, *, dims: int) -> tuple[Tensor, ...]:
    """One tensor per layer, from a single tensor of `dims` axes, from the first axis of a tensor with one more, or from a
    sequence."""
    if isinstance(value, Tensor):
        check_tensor(name, value)
        return (value,) if value.ndim <= dims else value.unbind(0)
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise DtypeError(
            f"`{name}` is expected to be a tensor or one tensor per layer, but got {type(value).__name__}."
        )
    tensors = tuple(value)
    for index, tensor in enumerate(tensors):
        check_tensor(f"{name}[{index}]", tensor)
    return tensors


def _mask(mask: LayerTensors | None, tokens: tuple[int, ...], device: torch.device) -> Tensor:
    total = sum(tokens)
    if mask is None:
        return torch.ones(total, dtype=torch.bool, device=device)
    if isinstance(mask, Tensor) and mask.ndim == 1:
        check_tensor("mask", mask)
        parts = (mask,) * len(tokens)
    else:
        parts = _tensor_sequence("mask", mask, dims=1)
    shapes = [tuple(part.shape) for part in parts]
    if shapes != [(count,) for count in tokens]:
        raise ShapeError(
            f"`mask` is expected to be [T], [L, T] or one [T] per layer with L = {len(tokens)} and T = "
            f"{sorted(set(tokens))}, but got {[list(shape) for shape in shapes]}."
        )
    for part in parts:
        check_holds_values(mask=part)
    joined = torch.cat([part.to(device) for part in parts])
    check_mask("mask", joined)
    return joined.bool()


@dataclass(frozen=True)
class RouterStats:
    """Statistics of the decisions of one forward pass. All tensors are detached; means over zero decisions are NaN."""

    decisions: RouterDecisions
    tokens: TokenStats
    """log Z and its parts per decision, as for the tokens of a head."""
    p_NE: Tensor
    """softmax over the experts."""
    entropy_N: Tensor
    """H = −Σ_e p_e log p_e in nats."""
    load: Tensor
    """[L, E]: active routes of each expert from counted tokens (k per token)."""

    @property
    def log_z(self) -> Tensor:
        """log Z_R of every decision, [N], masked ones included."""
        return self.tokens.log_z

    @property
    def valid(self) -> Tensor:
        """[N], True for counted decisions."""
        return self.tokens.valid

    @cached_property
    def decisions_per_layer(self) -> Tensor:
        """N_l, fp64."""
        return self.decisions.sum_per_layer(self.valid.double())

    @property
    def entropy_per_layer(self) -> Tensor:
        """Mean entropy of each layer's counted decisions, [L]."""
        return self.mean_per_layer(self.entropy_N)

    def mean_per_layer(self, values_N: Tensor) -> Tensor:
        """Mean over each layer's counted decisions, [L]."""
        total_L = self.decisions.sum_per_layer(torch.where(self.valid, values_N, 0))
        return total_L / self.decisions_per_layer.to(total_L)


@torch.no_grad()
def router_statistics(decisions: RouterDecisions, top_k: int) -> RouterStats:
    """One pass over the logits; everything the loss, its gradient and the record need."""
    logits_NE = decisions.logits_NE
    row_max = logits_NE.amax(dim=1)
    shifted_NE = logits_NE - row_max.unsqueeze(1)
    p_NE = shifted_NE.exp()
    s_N = p_NE.sum(dim=1)
    log_s = s_N.log()
    p_NE /= s_N.unsqueeze(1)
    # H = log S − Σ p (z − m); an expert at −inf has p = 0 and adds nothing, but 0·(−inf) would be NaN.
    entropy_N = log_s - torch.where(p_NE == 0, 0, p_NE * shifted_NE).sum(dim=1)
    tokens = TokenStats(
        row_max=row_max,
        log_s=log_s,
        target_logit=torch.zeros_like(row_max),
        valid=decisions.valid_N,
        vocab=decisions.experts,
    )
    experts = decisions.experts
    chosen_NK = logits_NE.topk(top_k, dim=1, sorted=False).indices + experts * decisions.layer_N.unsqueeze(1)
    counted_NK = decisions.valid_N.to(logits_NE.dtype).unsqueeze(1).expand_as(chosen_NK)
    load = logits_NE.new_zeros(decisions.layers * experts)
    load.scatter_add_(0, chosen_NK.reshape(-1), counted_NK.reshape(-1))
    return RouterStats(decisions, tokens, p_NE, entropy_N, load.view(decisions.layers, experts))
