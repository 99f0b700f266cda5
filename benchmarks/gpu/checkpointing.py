"""Under gradient checkpointing, in both of its kinds, a loss has the gradients that it has without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.agreement import Way, compared
from benchmarks.gpu.every_option import OBJECTIVES, Sweep, ways
from benchmarks.gpu.record import Checked
from benchmarks.gpu.small_loss import on_cpu, small_loss, stepper
from zloss.head.options import Backend


def checkpointing(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Every objective, dtype, backend and kind of products."""
    for dtype in sweep.dtypes:
        for objective in sweep.objectives:
            for way in ways(sweep, dtype, backends):
                for reentrant in (False, True):
                    case = f"{objective}, {'reentrant' if reentrant else 'not reentrant'}"
                    run = partial(_checkpointed, device, sweep, way, objective, reentrant)
                    yield compared("gradient checkpointing", case, way, device, run)


def _checkpointed(
    device: torch.device, sweep: Sweep, way: Way, name: str, reentrant: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    problem = small_loss(device, sweep, way.dtype)
    step = stepper(problem.target, OBJECTIVES[name], way.backend, way.products, sweep.chunk_size)

    def found(run: Callable[..., Tensor]) -> dict[str, Tensor]:
        problem.hidden.grad = problem.weight.grad = None
        loss = run(*problem.leaves)
        loss.backward()  # the reentrant kind does not answer torch.autograd.grad
        hidden_grad, weight_grad = problem.hidden.grad, problem.weight.grad
        assert hidden_grad is not None
        assert weight_grad is not None
        return on_cpu({"loss": loss, "hidden.grad": hidden_grad, "weight.grad": weight_grad})

    return found(lambda *leaves: checkpoint(step, *leaves, use_reentrant=reentrant)), found(step)
