"""A forward pass cut at the layers of a model, so that each layer can be recomputed alone, once for several losses.

A layer runs without a graph; what it returns becomes a leaf of the graph above it. The graph outside the layers (embedding,
what stands between two layers, final norm) is kept, because it is small. The pass costs what a pass without gradients
costs, and keeps the outputs of the layers: L·T·D numbers.

Axes: B blocks, N positions, D width, L layers, T = B·N.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zloss.measure.recomputed_layers import decoder_layers, recomputed_layers
from zloss.models.hidden_states import HiddenStates

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Arguments that cannot carry a tensor from one layer to another."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer, run without a graph."""

    layer: nn.Module
    arguments: list[Any]
    """Positional and named arguments, flat."""
    structure: TreeSpec
    outputs: tuple[Tensor, ...]
    """The floating tensors that the call returned, as leaves of the graph above the layer."""

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments that ask for a gradient, each once."""
        asking = {id(x): x for x in self.arguments if isinstance(x, Tensor) and x.requires_grad}
        return list(asking.values())

    def recompute(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """(the inputs as leaves, the outputs) of the same call with a graph of its own."""
        leaves = {id(x): x.detach().requires_grad_() for x in self.inputs}
        args, kwargs = tree_unflatten([leaves.get(id(x), x) for x in self.arguments], self.structure)
        with torch.enable_grad():
            returned = self.layer.forward(*args, **kwargs)
        return list(leaves.values()), tuple(x for x in tree_flatten(returned)[0] if _is_floating(x))


@dataclass(frozen=True, eq=False)
class CutForward:
    """Hidden states whose graph ends at the outputs of the last layer."""

    hidden_BND: Tensor
    calls: list[LayerCall]
    """The calls of the layers in order; empty where the layers cannot be cut apart, then the graph is whole."""


@torch.enable_grad()
def cut_forward(model: nn.Module, hidden_of: HiddenStates, ids_BN: Tensor) -> CutForward:
    """The hidden states of `ids_BN`; parameters that shall get gradients ask for them already.

    Layers that hand tensors to one another in a container (the shared keys and values of Gemma 4) are not cut: torch's
    checkpointing recomputes them in every backward pass. Layers that change their inputs in place are not recomputed.
    """
    try:
        with _cut_layers(model) as calls:
            return CutForward(hidden_of(ids_BN), calls)
    except _SharedContainer:
        with recomputed_layers(model):
            return CutForward(hidden_of(ids_BN), [])
    except _ChangedInput:
        return CutForward(hidden_of(ids_BN), [])


class _SharedContainer(Exception):
    """Raised by a layer with an argument that can carry, or did carry, a tensor to another layer."""


class _ChangedInput(Exception):
    """Raised by a layer that changed a tensor among its arguments in place."""


@contextmanager
def _cut_layers(model: nn.Module) -> Iterator[list[LayerCall]]:
    """Inside, every layer of the stack runs without a graph and its call is appended to the list."""
    layers, calls = decoder_layers(model), list[LayerCall]()
    for layer in layers:
        layer.forward = _Cut(layer, layer.forward, calls)
    try:
        yield calls
    finally:
        for layer in layers:
            del layer.forward  # the class's own method shows again


class _Cut:
    """Stands in for the forward method of a layer."""

    def __init__(self, layer: nn.Module, forward: Any, calls: list[LayerCall]) -> None:
        self._layer, self._forward, self._calls = layer, forward, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments, structure = tree_flatten((args, kwargs))
        if not all(isinstance(x, (Tensor, *PLAIN)) for x in arguments):
            raise _SharedContainer
        before = _versions(arguments)
        with torch.no_grad():
            returned = self._forward(*args, **kwargs)
        if _versions(arguments) != before:
            raise _ChangedInput
        if [id(x) for x in tree_flatten((args, kwargs))[0]] != [id(x) for x in arguments]:
            raise _SharedContainer
        flat, returned_structure = tree_flatten(returned)
        flat = [x.detach().requires_grad_() if _is_floating(x) else x for x in flat]
        outputs = tuple(x for x in flat if _is_floating(x))
        self._calls.append(LayerCall(self._layer, arguments, structure, outputs))
        return tree_unflatten(flat, returned_structure)


def _versions(arguments: list[Any]) -> list[int]:
    """How often every tensor was changed in place."""
    return [x._version for x in arguments if isinstance(x, Tensor)]


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
