"""Recompute a model's layers in every backward pass, so that a batch needs little more than one layer's activations.

Hugging Face's own switch works only in training mode, where dropout would disturb the measurement.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The list of modules with the most parameters, each module once: the stack of layers, of which a list of experts is a part.

    Empty where a model has no list of at least two modules.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    stacks = [list(dict.fromkeys(modules)) for modules in lists]
    return max(stacks, key=_parameters, default=[])


def _parameters(stack: list[nn.Module]) -> int:
    return sum(parameter.numel() for layer in stack for parameter in layer.parameters())


@contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Inside, every layer of the stack keeps only its input for the backward pass."""
    with replaced_forwards(decoder_layers(model), lambda layer, forward: _recomputed(forward)):
        yield


@contextmanager
def replaced_forwards(layers: Sequence[nn.Module], replace: Callable[[nn.Module, Forward], Forward]) -> Iterator[None]:
    """Inside, the forward of every layer is `replace(layer, forward)`; afterwards it is what it was.

    A forward that was set on the layer itself, as hooks of accelerate do, is put back; otherwise that of its class shows again.
    """
    before = [(layer, vars(layer).get("forward")) for layer in layers]
    for layer in layers:
        layer.forward = replace(layer, layer.forward)
    try:
        yield
    finally:
        for layer, own in before:
            if own is None:
                del layer.forward
            else:
                layer.forward = own


def _recomputed(forward: Forward) -> Forward:
    """The same function; in the backward pass it is called again with its containers as they were before the first call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, begun = _snapshot((args, kwargs)), False

        def call() -> Any:
            nonlocal begun
            again_args, again_kwargs = _snapshot(before) if begun else (args, kwargs)
            begun = True
            return forward(*again_args, **again_kwargs)

        return checkpoint(call, use_reentrant=False)

    return run


def _snapshot(arguments: Any) -> Any:
    """The same tensors in containers of their own."""
    return tree_map(lambda x: x if isinstance(x, Tensor) else copy.copy(x), arguments)
