"""A loss captured in a CUDA graph gives, replayed on new numbers, what it gives when it is called on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.agreement import Way, compared
from benchmarks.gpu.every_option import OBJECTIVES, Sweep, ways
from benchmarks.gpu.record import Checked
from benchmarks.gpu.small_loss import on_cpu, small_loss, stepper
from zloss.head.options import Backend

Results = dict[str, Tensor]


def graphs(device: torch.device, sweep: Sweep, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """Forward and backward in one graph; the dense backend, which keeps all logits, is left out."""
    for dtype in sweep.dtypes:
        for objective in sweep.objectives:
            for way in ways(sweep, dtype, tuple(name for name in backends if name != "dense")):
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
