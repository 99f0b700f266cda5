"""Recompute a model's layers in every backward pass, so that a batch needs little more than one layer's activations.

Hugging Face's own switch works only in training mode, where dropout would disturb the measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The list of modules with the most parameters: the stack of layers, of which a list of experts is a part.

    Empty where a model has no list of at least two modules.
    """
    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    return max(stacks, key=_parameters, default=[])


def _parameters(stack: list[nn.Module]) -> int:
    return sum(parameter.numel() for layer in stack for parameter in layer.parameters())


@contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Inside, every layer of the stack keeps only its input for the backward pass."""
    layers = decoder_layers(model)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own method shows again
