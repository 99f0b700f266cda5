"""A forward pass cut at the layers of a model, so that each layer can be recomputed alone, once for several losses.

A layer runs without a graph, or with a graph of its own where memory allows; what it returns becomes a leaf of the graph
above it. The graph outside the layers (embedding, what stands between two layers, final norm) is kept, because it is small.
The pass costs what a pass without gradients costs, and keeps the outputs of the layers: L·T·D numbers.

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

from zloss.measure.graph_room import GraphRoom, SavedBytes
from zloss.measure.recomputed_layers import Forward, decoder_layers, recomputed_layers, replaced_forwards
from zloss.models.output_head import HiddenStates

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Arguments that cannot carry a tensor from one layer to another."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer."""

    layer: nn.Module
    arguments: list[Any]
    """Positional and named arguments, flat."""
    structure: TreeSpec
    outputs: tuple[Tensor, ...]
    """The floating tensors that the call returned, as leaves of the graph above the layer."""
    graph: tuple[list[Tensor], tuple[Tensor, ...]] | None = None
    """What `recompute` would return, where the graph of the call was kept."""

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments that ask for a gradient, each once."""
        asking = {id(x): x for x in self.arguments if isinstance(x, Tensor) and x.requires_grad}
        return list(asking.values())

    def recompute(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """(the inputs as leaves, the outputs) of the same call with a graph of its own."""
        if self.graph is not None:
            return self.graph
        leaves, returned = _run(self.layer.forward, self.arguments, self.structure, graph=True)
        return leaves, _floating(tree_flatten(returned)[0])


@dataclass(frozen=True, eq=False)
class CutForward:
    """Hidden states whose graph ends at the outputs of the last layer."""

    hidden_BND: Tensor
    calls: list[LayerCall]
    """The calls of the layers in order; empty where the layers cannot be cut apart, then the graph is whole."""


@torch.enable_grad()
def cut_forward(model: nn.Module, hidden_of: HiddenStates, ids_BN: Tensor, room: GraphRoom | None = None) -> CutForward:
    """The hidden states of `ids_BN`; parameters that shall get gradients ask for them already.

    `room` is the memory for graphs of layers: a layer whose graph fits is not recomputed. None: every layer is recomputed.
    Layers that hand tensors to one another in a container (the shared keys and values of Gemma 4) are not cut: torch's
    checkpointing recomputes them in every backward pass. Layers that change their inputs in place are not recomputed.
    """
    try:
        with _cut_layers(model, room or GraphRoom()) as calls:
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
def _cut_layers(model: nn.Module, room: GraphRoom) -> Iterator[list[LayerCall]]:
    """Inside, every call of a layer of the stack is cut and appended to the list."""
    calls: list[LayerCall] = []
    graph_bytes: list[int] = []

    def cut(layer: nn.Module, forward: Forward) -> Forward:
        return _Cut(layer, forward, calls, room, graph_bytes)

    with replaced_forwards(decoder_layers(model), cut):
        yield calls


class _Cut:
    """Stands in for the forward method of a layer.

    The first call of a stack measures how many bytes the graph of a layer takes; later calls keep theirs where it fits.
    """

    def __init__(
        self, layer: nn.Module, forward: Forward, calls: list[LayerCall], room: GraphRoom, graph_bytes: list[int]
    ) -> None:
        self._layer, self._forward, self._calls = layer, forward, calls
        self._room, self._graph_bytes = room, graph_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments, structure = tree_flatten((args, kwargs))
        if not all(isinstance(x, (Tensor, *PLAIN)) for x in arguments):
            raise _SharedContainer
        keep = bool(self._graph_bytes) and self._room.take(self._graph_bytes[0])
        leaves, returned = _run(self._forward, arguments, structure, graph=keep)
        if not self._graph_bytes and self._room.left:
            saved = SavedBytes(self._layer)
            with saved:
                _run(self._forward, arguments, structure, graph=True)
            self._graph_bytes.append(saved.total)
        flat, returned_structure = tree_flatten(returned)
        cut = [x.detach().requires_grad_() if _is_floating(x) else x for x in flat]
        graph = (leaves, _floating(flat)) if keep else None
        self._calls.append(LayerCall(self._layer, arguments, structure, _floating(cut), graph))
        return tree_unflatten(cut, returned_structure)


def _run(forward: Forward, arguments: list[Any], structure: TreeSpec, *, graph: bool) -> tuple[list[Tensor], Any]:
    """(leaves in place of the inputs that ask for a gradient, what `forward` returned); the graph begins at the leaves."""
    asking = (x for x in arguments if isinstance(x, Tensor) and x.requires_grad)
    leaves = {id(x): x.detach().requires_grad_(graph) for x in asking}
    given = [leaves.get(id(x), x) for x in arguments]
    args, kwargs = tree_unflatten(given, structure)
    before = _versions(given)
    with torch.set_grad_enabled(graph):
        returned = forward(*args, **kwargs)
    if _versions(given) != before:
        raise _ChangedInput
    if [id(x) for x in tree_flatten((args, kwargs))[0]] != [id(x) for x in given]:
        raise _SharedContainer
    return list(leaves.values()), returned


def _versions(arguments: list[Any]) -> list[int]:
    """How often every tensor was changed in place."""
    return [x._version for x in arguments if isinstance(x, Tensor)]


def _floating(flat: list[Any]) -> tuple[Tensor, ...]:
    return tuple(x for x in flat if _is_floating(x))


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
