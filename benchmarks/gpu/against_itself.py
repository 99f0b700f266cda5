"""The tests that compare a run of a small loss with another run: edges, compiled, captured, checkpointed, ten thousand calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zloss
from benchmarks.gpu.against_fp64 import OBJECTIVES, Sweep, ways
from benchmarks.gpu.agreement import Way, compared
from benchmarks.gpu.record import Checked
from zloss.head.options import Backend, Products

Results = dict[str, Tensor]


@dataclass
class SmallLoss:
    """Leaves hidden [T, D] and weight [V, D], and a target with ignored tokens."""

    hidden: Tensor
    weight: Tensor
    target: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight

    def value_and_gradients(self, step: Callable[[Tensor, Tensor], Tensor]) -> Results:
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
        options: dict[str, Any] = {"backend": backend, "products": products, "chunk_size": chunk_size}
        return zloss.head_loss(hidden, weight, target, objective, **options).loss

    return step


def on_cpu(found: Results) -> Results:
    return {name: value.detach().double().cpu() for name, value in found.items()}


# Edges of the losses on the device: Z switched off, a batch without targets, and a buffer for dW.


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


# Inside torch.compile(fullgraph=True) the Triton losses give the values and gradients that they give outside.


def compiled(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """`head_loss` in every dtype and kind of products, and `logits_loss`. Other backends break the graph by design."""
    if "triton" not in backends:
        return
    for dtype, objective in product(sweep.dtypes, sweep.objectives[: sweep.compiled]):
        for way in ways(sweep, dtype, ("triton",)):
            yield compared("compiled head loss", objective, way, device, partial(_head, device, sweep, way, objective))
        way = Way(dtype, "triton", "auto")
        run = partial(_logits, device, sweep, way, objective)
        yield compared("compiled loss of logits", objective, way, device, run)


def _compiler(device: torch.device) -> str:
    """The default on a GPU; without one, tracing and autograd alone, because interpreted kernels cannot be lowered."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def _head(device: torch.device, sweep: Sweep, way: Way, name: str) -> tuple[Results, Results]:
    torch._dynamo.reset()
    problem = small_loss(device, sweep, way.dtype)
    step = stepper(problem.target, OBJECTIVES[name], way.backend, way.products, sweep.chunk_size)
    graph = torch.compile(step, fullgraph=True, backend=_compiler(device))
    return on_cpu(problem.value_and_gradients(graph)), on_cpu(problem.value_and_gradients(step))


def _logits(device: torch.device, sweep: Sweep, way: Way, name: str) -> tuple[Results, Results]:
    torch._dynamo.reset()
    problem = small_loss(device, sweep, way.dtype)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        logits_TV = torch.nn.functional.linear(hidden, weight)
        return zloss.logits_loss(
            logits_TV, problem.target, OBJECTIVES[name], weight=weight.detach(), backend="triton"
        ).loss

    graph = torch.compile(step, fullgraph=True, backend=_compiler(device))
    return on_cpu(problem.value_and_gradients(graph)), on_cpu(problem.value_and_gradients(step))


# A loss captured in a CUDA graph gives, replayed on new numbers, what it gives when it is called on them.


def graphs(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Forward and backward in one graph; the dense backend, which keeps all logits, is left out."""
    without_dense = tuple(name for name in backends if name != "dense")
    for dtype, objective in product(sweep.dtypes, sweep.objectives):
        for way in ways(sweep, dtype, without_dense):
            yield compared("CUDA graph", objective, way, device, partial(_replayed, device, sweep, way, objective))


def _replayed(device: torch.device, sweep: Sweep, way: Way, name: str) -> tuple[Results, Results]:
    static, fresh = small_loss(device, sweep, way.dtype), small_loss(device, sweep, way.dtype, seed=1)
    step = stepper(static.target, OBJECTIVES[name], way.backend, way.products, sweep.chunk_size)
    replay = capture(device, lambda: static.value_and_gradients(step))
    with torch.no_grad():
        for mine, new in zip((*static.leaves, static.target), (*fresh.leaves, fresh.target), strict=True):
            mine.copy_(new)
    wanted_step = stepper(fresh.target, OBJECTIVES[name], way.backend, way.products, sweep.chunk_size)
    return on_cpu(replay()), on_cpu(fresh.value_and_gradients(wanted_step))


def capture(device: torch.device, work: Callable[[], Results]) -> Callable[[], Results]:
    """`work` as a graph that can be replayed. Without a GPU a replay is a second call."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels compile and workspaces are allocated outside the capture
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()

    def replay() -> Results:
        graph.replay()
        return results

    return replay


# Under gradient checkpointing, in both of its kinds, a loss has the gradients that it has without.


def checkpointing(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Every objective, dtype, backend and kind of products."""
    for dtype, objective in product(sweep.dtypes, sweep.objectives):
        for way, reentrant in product(ways(sweep, dtype, backends), (False, True)):
            case = f"{objective}, {'reentrant' if reentrant else 'not reentrant'}"
            run = partial(_checkpointed, device, sweep, way, objective, reentrant)
            yield compared("gradient checkpointing", case, way, device, run)


def _checkpointed(device: torch.device, sweep: Sweep, way: Way, name: str, reentrant: bool) -> tuple[Results, Results]:
    problem = small_loss(device, sweep, way.dtype)
    step = stepper(problem.target, OBJECTIVES[name], way.backend, way.products, sweep.chunk_size)

    def found(run: Callable[..., Tensor]) -> Results:
        problem.hidden.grad = problem.weight.grad = None
        loss = run(*problem.leaves)
        loss.backward()  # the reentrant kind does not answer torch.autograd.grad
        hidden_grad, weight_grad = problem.hidden.grad, problem.weight.grad
        assert hidden_grad is not None
        assert weight_grad is not None
        return on_cpu({"loss": loss, "hidden.grad": hidden_grad, "weight.grad": weight_grad})

    return found(lambda *leaves: checkpoint(step, *leaves, use_reentrant=reentrant)), found(step)


# Ten thousand calls of a loss leave no memory behind.

ALLOWED = {"cuda": 2.0**20, "cpu": 2.0**25}
"""Bytes. Libraries may take a workspace late; the resident size of a process moves by itself."""


def held_bytes(device: torch.device) -> float:
    """Memory in tensors on a GPU; the resident size of this process without one (Linux)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return float(torch.cuda.memory_allocated(device))
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * float(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def flat_memory(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...], calls: int) -> Iterator[Checked]:
    """Growth in bytes between the third call and the last, per backend."""
    for backend in backends:
        way = Way(torch.bfloat16, backend, "auto")
        problem = small_loss(device, sweep, way.dtype)
        step = stepper(problem.target, zloss.GainAwareZLoss(1e-4), backend, way.products, sweep.chunk_size)
        growth, problem_line = None, None
        try:
            before = 0.0
            for index in range(calls):
                problem.value_and_gradients(step)
                if index == min(2, calls - 1):
                    before = held_bytes(device)
            growth = max(0.0, held_bytes(device) - before)
        except Exception as error:  # a test that cannot run has failed
            problem_line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        yield Checked(
            "flat memory", f"{calls} calls", way.dtype_name, backend, way.products, "bytes grown", growth,
            ALLOWED[device.type], problem_line,
        )  # fmt: skip
