"""Routing decisions of a forward pass, and their statistics: log-normalizer, entropy, expert load.

Axes: L layers, T tokens of a layer, E experts, K active routes, N decisions (all layers, one after the other).
Scaling: means over counted decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zloss.errors import DeviceError, DtypeError, InputError, ShapeError
from zloss.statistics import TokenStats
from zloss.tensors import at_least_fp32, check_holds_values, check_tensor

LayerTensors = Tensor | Sequence[Tensor]
"""One [T, E] tensor per layer, an [L, T, E] tensor, or [T, E] for a single layer."""


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

    def spread(self, values_L: Tensor) -> Tensor:
        """One value per layer, repeated over its decisions, [N]."""
        return values_L[self.layer_N]


def read_router_logits(router_logits: LayerTensors, mask: LayerTensors | None, *, two_stacks: bool) -> RouterDecisions:
    """Check the layers against each other and the mask against the layers."""
    tensors, layers = _layers(router_logits)
    experts, tokens = layers[0].shape[1], tuple(layer.shape[0] for layer in layers)
    for index, layer in enumerate(layers):
        if layer.shape[1] != experts:
            raise ShapeError(
                f"every layer of `router_logits` is expected to have E = {experts} experts as layer 0 has, but layer "
                f"{index} has shape {list(layer.shape)}."
            )
        if layer.shape[0] != tokens[0] and not two_stacks:
            raise ShapeError(
                f"every layer of `router_logits` is expected to have T = {tokens[0]} tokens as layer 0 has, but layer "
                f"{index} has {layer.shape[0]}. For an encoder-decoder pass `context=RouterContext(encoder_layers=...)`."
            )
        if layer.device != layers[0].device:
            raise DeviceError(
                f"layers of `router_logits` are expected on one device, but layer 0 is on {layers[0].device} and layer "
                f"{index} on {layer.device}: move them with `.to(...)`."
            )
        if not layer.is_floating_point():
            raise DtypeError(f"`router_logits` are expected to be floating point, but layer {index} is {layer.dtype}.")
    with torch.no_grad():
        logits_NE = torch.cat([at_least_fp32(layer.detach()) for layer in layers])
        sizes = torch.tensor(tokens, device=logits_NE.device)
        layer_N = torch.repeat_interleave(sizes, output_size=sum(tokens))
        valid_N = _mask(mask, tokens, logits_NE.device)
    return RouterDecisions(tensors, tokens, logits_NE, valid_N, layer_N)


def _layers(router_logits: LayerTensors) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
    """The caller's tensors, and a [T, E] view of each layer."""
    if isinstance(router_logits, Tensor):
        check_tensor("router_logits", router_logits)
        if router_logits.ndim not in (2, 3):
            raise ShapeError(
                f"`router_logits` is expected to be [T, E], [L, T, E] or a sequence of [T, E], but got "
                f"{list(router_logits.shape)}."
            )
        tensors: tuple[Tensor, ...] = (router_logits,)
        layers: tuple[Tensor, ...] = (router_logits,) if router_logits.ndim == 2 else router_logits.unbind(0)
    else:
        tensors = layers = tensor_sequence("router_logits", router_logits, dims=2)
    if not layers:
        raise InputError("`router_logits` holds no layer: the model returned no router logits.")
    for index, layer in enumerate(layers):
        if not isinstance(layer, Tensor) or layer.ndim != 2:
            got = list(layer.shape) if isinstance(layer, Tensor) else type(layer).__name__
            raise ShapeError(
                f"layer {index} of `router_logits` is expected to be [T, E], but got {got}: flatten batch and "
                "sequence with `.flatten(0, -2)`."
            )
        check_holds_values(router_logits=layer)
        if layer.shape[1] == 0:
            raise ShapeError(f"layer {index} of `router_logits` has no experts: shape {list(layer.shape)}.")
    return tensors, layers


def tensor_sequence(name: str, value: object, *, dims: int) -> tuple[Tensor, ...]:
    """One tensor per layer: a tensor of `dims` axes alone, the first axis of one with one more, or a sequence."""
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
        parts = tensor_sequence("mask", mask, dims=1)
    shapes = [tuple(part.shape) for part in parts]
    if shapes != [(count,) for count in tokens]:
        raise ShapeError(
            f"`mask` is expected to be [T], [L, T] or one [T] per layer with L = {len(tokens)} and T = "
            f"{sorted(set(tokens))}, but got {[list(shape) for shape in shapes]}."
        )
    for part in parts:
        check_holds_values(mask=part)
    return torch.cat([part.to(device=device, dtype=torch.bool) for part in parts])


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

    @cached_property
    def entropy_per_layer(self) -> Tensor:
        """Mean entropy of each layer's counted decisions, [L]."""
        return self.mean_per_layer(self.entropy_N)

    @cached_property
    def entropy(self) -> Tensor:
        """Mean entropy over all counted decisions."""
        return self.mean(self.entropy_N)

    @cached_property
    def load_cv_per_layer(self) -> Tensor:
        """std_e(load) / mean_e(load) of each layer, the population standard deviation, [L]."""
        return self.load.std(dim=1, correction=0) / self.load.mean(dim=1)

    @cached_property
    def load_cv(self) -> Tensor:
        """Mean over layers of the load's coefficient of variation; taken per layer, so imbalances of two layers cannot cancel."""
        return self.load_cv_per_layer.nanmean()

    @cached_property
    def nonfinite(self) -> Tensor:
        """How many counted decisions have a NaN or infinite log Z."""
        return (~torch.isfinite(self.log_z) & self.valid).sum()

    def dropped_per_layer(self, capacity: int) -> Tensor:
        """Fraction of each layer's active routes beyond `capacity` per expert, [L], whichever of them are dropped."""
        return (self.load - capacity).clamp_min(0).sum(dim=1) / self.load.sum(dim=1)

    def mean(self, values_N: Tensor) -> Tensor:
        """Mean over counted decisions."""
        return torch.where(self.valid, values_N, 0).sum() / self.valid.sum()

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
    return RouterStats(decisions, tokens, p_NE, entropy_N, _load(decisions, top_k))


def _load(decisions: RouterDecisions, top_k: int) -> Tensor:
    layers, experts = decisions.layers, decisions.experts
    if top_k == experts:
        routes_L = decisions.sum_per_layer(decisions.valid_N.to(decisions.logits_NE.dtype))
        return routes_L.unsqueeze(1).expand(layers, experts).clone()
    chosen_NK = decisions.logits_NE.topk(top_k, dim=1, sorted=False).indices + experts * decisions.layer_N.unsqueeze(1)
    counted_NK = decisions.valid_N.to(decisions.logits_NE.dtype).unsqueeze(1).expand_as(chosen_NK)
    load = decisions.logits_NE.new_zeros(layers * experts)
    load.scatter_add_(0, chosen_NK.reshape(-1), counted_NK.reshape(-1))
    return load.view(layers, experts)
