"""One small training loss on the device, for the laws that compare a run with another run instead of with fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import zloss
from benchmarks.gpu.every_option import Sweep
from zloss.head.options import Backend, Products


@dataclass
class SmallLoss:
    """Leaves hidden [T, D] and weight [V, D], and a target with ignored tokens."""

    hidden: Tensor
    weight: Tensor
    target: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight

    def value_and_gradients(self, step: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        """Of `step(hidden, weight)`."""
        loss = step(self.hidden, self.weight)
        grads = torch.autograd.grad(loss, self.leaves)
        return {"loss": loss.detach(), "hidden.grad": grads[0], "weight.grad": grads[1]}


def small_loss(device: torch.device, sweep: Sweep, dtype: torch.dtype, seed: int = 0) -> SmallLoss:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sweep.tokens, sweep.width, generator=g).to(device, dtype)
    weight = (torch.randn(sweep.vocab, sweep.width, generator=g) / sweep.width**0.5).to(device, dtype)
    target = torch.randint(sweep.vocab, (sweep.tokens,), generator=g)
    target[1] = -100
    return SmallLoss(hidden.requires_grad_(), weight.requires_grad_(), target.to(device))


def stepper(
    target: Tensor, objective: zloss.Objective, backend: Backend, products: Products, chunk_size: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean loss as a function of hidden and weight."""

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return zloss.head_loss(
            hidden,
            weight,
            target,
            objective,
            backend=backend,
            products=products,
            chunk_size=chunk_size,
        ).loss

    return step


def on_cpu(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().double().cpu() for name, value in found.items()}
