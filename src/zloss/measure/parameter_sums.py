"""Gradients of parameters for several losses, summed until the last use of a parameter, then reduced to numbers.

Axes: U rows of a tied table that the batch reads, D width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zloss.errors import CheckpointError
from zloss.measure.recomputed_layers import decoder_layers
from zloss.models.output_head import OutputHead

SLICE = 2**20
"""Numbers of a gradient that are widened to fp64 at a time."""


@dataclass(frozen=True)
class BodyGradients:
    """Of every seed, over the parameters other than the head's weight and bias."""

    squares: dict[str, float]
    """Σ ‖g‖² of the seeds with parameter gradients."""
    dots: dict[tuple[str, str], float]
    """⟨g_a, g_b⟩ of the pairs that were asked for."""
    table_UD: dict[str, Tensor]
    """Gradient of a tied table through the input embedding, at its used rows; empty for an untied head."""


class ParameterSums:
    """The gradients of the seeds in `pairs`, and those of every seed at a tied table.

    `used_rows_U` are the token ids of the batch: at other rows the gradient of the input table is zero.
    """

    def __init__(
        self, model: nn.Module, head: OutputHead, pairs: Collection[tuple[str, str]], used_rows_U: Tensor
    ) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._table = _tied_table(model, head)
        self._layers = _only_layer(model)
        self._rows_U = used_rows_U
        self._sums: dict[int, dict[str, Tensor]] = defaultdict(dict)
        self._reduced: set[int] = set()
        self._squares: dict[str, float] = {name: 0.0 for pair in pairs for name in pair}
        self._dots: dict[tuple[str, str], float] = dict.fromkeys(pairs, 0.0)

    def owns(self, tensor: Tensor) -> bool:
        """Whether it is a parameter of the model."""
        return id(tensor) in self._names

    def wants(self, tensor: Tensor, seed: str) -> bool:
        """Whether the gradient of this seed is needed at a leaf of the graph."""
        return seed in self._squares or not self.owns(tensor) or id(tensor) == self._table

    def add(self, parameter: Tensor, seed: str, grad: Tensor) -> None:
        """One more part of the gradient of a seed."""
        key = id(parameter)
        if key in self._reduced:
            raise CheckpointError(
                f"{self._names[key]} is used by several layers, but only one of them has it among its parameters: "
                "gradients of such a model are not supported."
            )
        if key == self._table:
            grad = grad[self._rows_U]
        here = self._sums[key]
        # Parts in 16 bits are summed in fp32.
        here[seed] = here[seed].to(torch.promote_types(grad.dtype, torch.float32)) + grad if seed in here else grad

    def reduce_layer(self, layer: nn.Module) -> None:
        """Reduce the parameters that belong to this layer and to nothing else."""
        for key in [key for key in self._sums if self._layers.get(key) == id(layer)]:
            self._reduce(key)

    def result(self) -> BodyGradients:
        """The numbers, after the gradients that are left were reduced."""
        table_UD = {} if self._table is None else self._sums.pop(self._table, {})
        for key in list(self._sums):
            self._reduce(key)
        return BodyGradients(self._squares, self._dots, table_UD)

    def _reduce(self, key: int) -> None:
        here = self._sums.pop(key)
        self._reduced.add(key)
        for seed in self._squares:
            if seed in here:
                self._squares[seed] += float(torch.linalg.vector_norm(here[seed], dtype=torch.float64) ** 2)
        for a, b in self._dots:
            if a in here and b in here:
                self._dots[a, b] += _dot(here[a], here[b])


def _tied_table(model: nn.Module, head: OutputHead) -> int | None:
    """Identity of the parameter that is both input table and head; None for an untied head."""
    if not head.tied:
        return None
    return next(id(p) for p in model.parameters() if p.data_ptr() == head.weight_VD.data_ptr())


def _only_layer(model: nn.Module) -> dict[int, int]:
    """Identity of the layer of every parameter that belongs to one layer and to nothing else."""
    layers = decoder_layers(model)
    inside = {id(module) for layer in layers for module in layer.modules()}
    elsewhere = {id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
    owners: dict[int, set[int]] = defaultdict(set)
    for layer in layers:
        for parameter in layer.parameters():
            owners[id(parameter)].add(id(layer))
    return {key: next(iter(found)) for key, found in owners.items() if len(found) == 1 and key not in elsewhere}


def _dot(a: Tensor, b: Tensor) -> float:
    """⟨a, b⟩ in fp64."""
    slices = zip(torch.split(a.flatten(), SLICE), torch.split(b.flatten(), SLICE), strict=True)
    return float(sum(torch.dot(x.double(), y.double()) for x, y in slices))
