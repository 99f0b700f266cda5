"""Router logits as they come from a model, checked and laid out as one list of decisions.

Axes: L layers, T tokens of a layer, E experts, N decisions (all layers, one after the other).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.errors import DeviceError, DtypeError, InputError, ShapeError
from zloss.tensors import at_least_fp32, check_holds_values, check_tensor

LayerTensors = Tensor | Sequence[Tensor]
"""One [T, E] tensor per layer, an [L, T, E] tensor, or [T, E] for a single layer."""


@dataclass(frozen=True)
class RouterInput:
    """Every routing decision of a forward pass."""

    tensors: tuple[Tensor, ...]
    """What the caller gave, for the gradient to return to."""
    tokens: tuple[int, ...]
    """T of every layer, masked tokens included."""
    logits_NE: Tensor
    """Detached, fp32 (fp64 for fp64), layer after layer."""
    valid_N: Tensor
    """True where the decision is counted."""
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


def read_router_logits(router_logits: LayerTensors, mask: LayerTensors | None, *, two_stacks: bool) -> RouterInput:
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
    return RouterInput(tensors, tokens, logits_NE, valid_N, layer_N)


def _layers(router_logits: LayerTensors) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
    """The given tensors, and a [T, E] view of each layer."""
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
