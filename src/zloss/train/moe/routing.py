"""What the routers of a model decided in one forward pass: their logits, and the routes the model really took.

Axes: T counted tokens, E experts, K active routes; one entry per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import InputError
from zloss.models.routers import RouterModule, find_routers


@dataclass(frozen=True)
class Routing:
    """One forward pass."""

    logits: tuple[Tensor, ...]
    """[T, E] of every layer, before the softmax, with their autograd graph."""
    chosen: tuple[Tensor, ...]
    """[T, K] of every layer: the experts each token was sent to."""

    @property
    def tokens(self) -> int:
        """T."""
        return self.logits[0].shape[0]

    def dropped(self, top_k: int) -> float:
        """Share of the k routes of every decision that the model did not take."""
        return 1 - sum(chosen_TK.numel() for chosen_TK in self.chosen) / (top_k * self.tokens * len(self.logits))


class RoutingTap:
    """Collects the routing of forward passes; `counted` drops the positions whose prediction is not counted."""

    def __init__(self, model: nn.Module, counted: Callable[[Tensor], Tensor]) -> None:
        self._routers, self._counted = find_routers(model), counted
        self._outputs: list[tuple[Tensor, Tensor]] = []

    def weights(self, experts: int) -> list[Tensor]:
        """W_R [E, D] of every layer."""
        found = [router.weight(experts) for router in self._routers.modules]
        if any(weight is None for weight in found):
            raise InputError("a router of this model has no single [E, D] weight: its correction norm is not defined.")
        return [weight for weight in found if weight is not None]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Forward passes inside the block are collected."""
        hooks = [router.module.register_forward_hook(self._hook(router)) for router in self._routers.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, ids_BN: Tensor) -> Routing:
        """The routing of the pass over these token ids; each pass is taken once."""
        outputs, self._outputs = self._outputs, []
        logits, chosen = zip(*outputs, strict=True)
        rows = ids_BN.shape[0]

        def counted(tensor: Tensor) -> Tensor:
            return self._counted(tensor.view(rows, -1, tensor.shape[-1])).flatten(0, 1)

        return Routing(tuple(map(counted, logits)), tuple(map(counted, chosen)))

    def _hook(self, router: RouterModule) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs.append((router.logits(output), _indices(router, output)))

        return keep


def _indices(router: RouterModule, output: Any) -> Tensor:
    """[T, K] of one layer: the one part of the router's output that holds whole numbers."""
    found = [
        part
        for part in (output if isinstance(output, tuple) else ())
        if isinstance(part, Tensor) and not part.is_floating_point() and part.dtype != torch.bool
    ]
    if len(found) != 1:
        raise InputError(f"router {router.name!r} does not return the experts it chose: its routes cannot be counted.")
    return found[0]
