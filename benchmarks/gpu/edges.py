"""Edges of the losses on the device: Z switched off, a batch without targets, and a buffer for dW."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import zloss
from benchmarks.gpu.agreement import Way, compared
from benchmarks.gpu.every_option import Sweep, ways
from benchmarks.gpu.record import Checked
from benchmarks.gpu.small_loss import on_cpu, small_loss, stepper
from zloss.head.options import Backend

Results = dict[str, Tensor]


def edges(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Every dtype, backend and kind of products."""
    for dtype in sweep.dtypes:
        for way in ways(sweep, dtype, backends):
            for law, run in LAWS.items():
                if run is _given_buffer and way.backend == "dense":
                    continue  # autograd forms its dW
                yield compared(law, "standard", way, device, partial(run, device, sweep, way))


def _off(device: torch.device, sweep: Sweep, way: Way) -> tuple[Results, Results]:
    """A coefficient of 0 is cross-entropy bit for bit: what differs is counted as an error of 1."""
    problem = small_loss(device, sweep, way.dtype)
    found, wanted = (
        problem.value_and_gradients(stepper(problem.target, objective, way.backend, way.products, sweep.chunk_size))
        for objective in (zloss.StandardZLoss(0.0), zloss.CrossEntropy())
    )
    equal = all(torch.equal(found[name], wanted[name]) for name in wanted)
    return {"equal": torch.tensor(float(equal))}, {"equal": torch.tensor(1.0)}


def _nothing_counted(device: torch.device, sweep: Sweep, way: Way) -> tuple[Results, Results]:
    """All tokens ignored: loss 0 and gradients 0."""
    problem = small_loss(device, sweep, way.dtype)
    nothing = torch.full_like(problem.target, -100)
    step = stepper(nothing, zloss.StandardZLoss(0.7), way.backend, way.products, sweep.chunk_size)
    found = on_cpu(problem.value_and_gradients(step))
    return found, {name: torch.zeros_like(value) for name, value in found.items()}


def _given_buffer(device: torch.device, sweep: Sweep, way: Way) -> tuple[Results, Results]:
    """dW is added to a given fp32 buffer as it would come in weight.grad."""
    problem = small_loss(device, sweep, way.dtype)
    buffer_VD = torch.ones(problem.weight.shape, device=device)
    options: dict[str, Any] = {"backend": way.backend, "products": way.products, "chunk_size": sweep.chunk_size}
    out = zloss.head_loss(
        *problem.leaves, problem.target, zloss.StandardZLoss(0.7), weight_grad_buffer=buffer_VD, **options
    )
    out.loss.backward()
    step = stepper(problem.target, zloss.StandardZLoss(0.7), way.backend, way.products, sweep.chunk_size)
    wanted = problem.value_and_gradients(step)["weight.grad"]
    return on_cpu({"weight.grad": buffer_VD - 1}), on_cpu({"weight.grad": wanted})


LAWS: dict[str, Callable[[torch.device, Sweep, Way], tuple[Results, Results]]] = {
    "off is cross-entropy, bit for bit": _off,
    "all tokens ignored": _nothing_counted,
    "buffer for dW": _given_buffer,
}
