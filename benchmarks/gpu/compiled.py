"""Inside torch.compile(fullgraph=True) the Triton losses give the values and gradients that they give outside."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import zloss
from benchmarks.gpu.agreement import Way, compared
from benchmarks.gpu.every_option import OBJECTIVES, Sweep, ways
from benchmarks.gpu.record import Checked
from benchmarks.gpu.small_loss import on_cpu, small_loss, stepper
from zloss.head.options import Backend


def compiled(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """`head_loss` in every dtype and kind of products, and `logits_loss`. Other backends break the graph by design."""
    if "triton" not in backends:
        return
    for dtype in sweep.dtypes:
        for objective in sweep.objectives[: sweep.compiled]:
            for way in ways(sweep, dtype, ("triton",)):
                yield compared(
                    "compiled head loss", objective, way, device, partial(_head, device, sweep, way, objective)
                )
            way = Way(dtype, "triton", "auto")
            yield compared(
                "compiled loss of logits", objective, way, device, partial(_logits, device, sweep, way, objective)
            )


def _compiler(device: torch.device) -> str:
    """The default on a GPU; without one, tracing and autograd alone, because interpreted kernels cannot be lowered."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def _head(device: torch.device, sweep: Sweep, way: Way, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch._dynamo.reset()
    problem = small_loss(device, sweep, way.dtype)
    step = stepper(problem.target, OBJECTIVES[name], way.backend, way.products, sweep.chunk_size)
    graph = torch.compile(step, fullgraph=True, backend=_compiler(device))
    return on_cpu(problem.value_and_gradients(graph)), on_cpu(problem.value_and_gradients(step))


def _logits(device: torch.device, sweep: Sweep, way: Way, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch._dynamo.reset()
    problem = small_loss(device, sweep, way.dtype)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        logits_TV = torch.nn.functional.linear(hidden, weight)
        return zloss.logits_loss(
            logits_TV, problem.target, OBJECTIVES[name], weight=weight.detach(), backend="triton"
        ).loss

    graph = torch.compile(step, fullgraph=True, backend=_compiler(device))
    return on_cpu(problem.value_and_gradients(graph)), on_cpu(problem.value_and_gradients(step))
