"""The decoder layers of a model, and a forward pass that is cut at them, so that each layer can be recomputed alone.

In such a pass a layer runs without a graph, and what it returns is a leaf of the graph above it. The graph outside the layers
(embedding, what is between two layers, final norm) is kept, because it is small. The pass costs what a pass without gradients
costs, and keeps the outputs of the layers: L·T·D numbers.

Axes: B blocks, N positions, D width, L layers, T = B·N.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint as recomputed_in_backward

from zloss.models.output_head import HiddenStates

Forward = Callable[..., Any]
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Arguments that cannot carry a tensor from one layer to another."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The list of modules with the most parameters, each module once: the stack of layers, of which a list of experts is a part.

    Empty where a model has no list of at least two modules.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    stacks = [list(dict.fromkeys(modules)) for modules in lists]
    return max(stacks, key=lambda stack: sum(p.numel() for layer in stack for p in layer.parameters()), default=[])


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer."""

    layer: nn.Module
    arguments: list[Any]
    """Positional and named arguments, flat."""
    structure: TreeSpec
    outputs: list[Tensor]
    """The floating tensors that the call returned, as leaves of the graph above the layer."""

    def recompute(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """(arguments that require a gradient, leaves in their place, outputs) of the same call with a graph of its own."""
        leaves, returned = _run(self.layer.forward, self.arguments, self.structure, graph=True)
        inputs = {id(x): x for x in self.arguments if id(x) in leaves}
        return list(inputs.values()), [leaves[key] for key in inputs], _floating(returned)


class _CannotCut(Exception):
    """Raised by a layer that changed an argument in place, or can hand a tensor to another layer in one of them."""


@torch.enable_grad()
def cut_forward(model: nn.Module, hidden_of: HiddenStates, ids_BN: Tensor) -> tuple[Tensor, list[LayerCall]]:
    """(hidden states [B, N, D], the calls of the layers in order) of one forward pass; parameters require gradients already.

    Layers that hand tensors to one another in a container (the shared keys and values of Gemma 4), or that change their inputs
    in place, are not cut: there are no calls, and torch's checkpointing recomputes each layer in every backward pass.
    """
    calls: list[LayerCall] = []
    try:
        with replaced_forwards(model, lambda layer, forward: _cut(layer, forward, calls)):
            return hidden_of(ids_BN), calls
    except _CannotCut:
        with replaced_forwards(model, lambda layer, forward: _recomputed(forward)):
            return hidden_of(ids_BN), []


def _cut(layer: nn.Module, forward: Forward, calls: list[LayerCall]) -> Forward:
    """The forward of a layer without a graph; what it returns are leaves, and the call is appended to `calls`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments, structure = tree_flatten((args, kwargs))
        if not all(isinstance(x, (Tensor, *PLAIN)) for x in arguments):
            raise _CannotCut
        _, returned = _run(forward, arguments, structure, graph=False)
        returned = tree_map(lambda x: x.detach().requires_grad_() if _is_floating(x) else x, returned)
        calls.append(LayerCall(layer, arguments, structure, _floating(returned)))
        return returned

    return run


def _run(forward: Forward, arguments: list[Any], structure: TreeSpec, *, graph: bool) -> tuple[dict[int, Tensor], Any]:
    """(leaves by the identity of the arguments that they replace, what `forward` returned); the graph starts at the leaves."""
    asking = (x for x in arguments if isinstance(x, Tensor) and x.requires_grad)
    leaves = {id(x): x.detach().requires_grad_(graph) for x in asking}
    given = [leaves.get(id(x), x) for x in arguments]
    args, kwargs = tree_unflatten(given, structure)
    versions = [x._version for x in given if isinstance(x, Tensor)]
    with torch.set_grad_enabled(graph):
        returned = forward(*args, **kwargs)
    replaced = [id(x) for x in tree_leaves((args, kwargs))] != [id(x) for x in given]
    if replaced or [x._version for x in given if isinstance(x, Tensor)] != versions:
        raise _CannotCut
    return leaves, returned


def _recomputed(forward: Forward) -> Forward:
    """The same function; the backward pass calls it again with its arguments as they were before the first call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        def copied(arguments: Any) -> Any:
            return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else copy.copy(x), arguments)

        before, first = copied((args, kwargs)), iter([(args, kwargs)])  # other layers read what the first call changes

        def call() -> Any:
            now_args, now_kwargs = next(first, None) or copied(before)
            return forward(*now_args, **now_kwargs)

        return recomputed_in_backward(call, use_reentrant=False)

    return run


@contextmanager
def replaced_forwards(model: nn.Module, replace: Callable[[nn.Module, Forward], Forward]) -> Iterator[None]:
    """Inside, the forward of every decoder layer is `replace(layer, forward)`; afterwards it is what it was.

    A forward that was set on the layer itself, as hooks of accelerate do, is put back; otherwise that of its class shows again.
    """
    before = [(layer, vars(layer).get("forward")) for layer in decoder_layers(model)]
    for layer, _ in before:
        layer.forward = replace(layer, layer.forward)
    try:
        yield
    finally:
        for layer, instance_forward in before:
            if instance_forward is None:
                del layer.forward
            else:
                layer.forward = instance_forward


def _floating(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if _is_floating(x)]


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
