"""Interleaved timing of forward and backward with CUDA events, and the peak of the allocator, one shape at a time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu.contenders import CONTENDERS, Contender
from benchmarks.gpu.record import Timed

PRODUCTS = "three products in the operands' dtype"
"""What a loss that does not keep the logits has to do: the row that ratios refer to."""
Shape = tuple[int, int, int]
"""T, D, V."""
SHAPES: tuple[Shape, ...] = ((8192, 4096, 128256),)
"""At which others have published their times."""
QUICK_SHAPES: tuple[Shape, ...] = ((48, 16, 301),)


def time_shape(
    device: torch.device, shape: Shape, dtype: torch.dtype, rounds: int, until: float, say: Callable[[str], None]
) -> Iterator[Timed]:
    """Every contender once per round, after a round that compiles and is not measured; after `until` no fourth round begins."""
    hidden, weight, target = make_tensors(device, shape, dtype)
    runs: dict[str, Callable[[], object]] = {PRODUCTS: products(hidden, weight)}
    why_not: dict[str, str] = {}
    for contender in CONTENDERS:
        if reason := contender.why_not(device):
            why_not[contender.name] = reason
        else:
            runs[contender.name] = step(contender, hidden, weight, target)
    peaks: dict[str, int | None] = {}
    milliseconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(rounds + 1):
        if round_index > 3 and time.monotonic() > until:
            break
        for name, run in list(runs.items()):
            say(f"{shape}: {name}, {f'round {round_index} of {rounds}' if round_index else 'warm-up'}")
            try:
                if round_index == 0:
                    run()
                    hidden.grad = weight.grad = None  # the peak counts the gradients of this call, not of the last
                    peaks[name] = peak_bytes(device, run)
                else:
                    milliseconds[name].append(elapsed_ms(device, run))
            except Exception as error:  # out of memory, or a peer that does not know this card
                why_not[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
                del runs[name]
                clear(device)
    has_z = {contender.name: contender.has_z for contender in CONTENDERS} | {PRODUCTS: False}
    dtype_name = str(dtype).removeprefix("torch.")
    for name in (PRODUCTS, *(contender.name for contender in CONTENDERS)):
        if name in why_not:
            yield Timed(name, has_z[name], *shape, dtype_name, None, None, None, None, why_not[name])
            continue
        times = milliseconds[name]
        best = min(times)
        numbers = (best, statistics.median(times), max(times) / best)
        yield Timed(name, has_z[name], *shape, dtype_name, *numbers, peaks[name])


def make_tensors(device: torch.device, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, target): leaves with logits of standard deviation 1."""
    tokens, width, vocab = shape
    g = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=g, device=device).to(dtype)
    weight = torch.randn(vocab, width, generator=g, device=device).div_(width**0.5).to(dtype)
    target = torch.randint(vocab, (tokens,), generator=g, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def step(contender: Contender, hidden: Tensor, weight: Tensor, target: Tensor) -> Callable[[], object]:
    """Forward and backward; gradients are dropped before the next call."""
    loaded: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = []

    def run() -> None:
        if not loaded:
            loaded.append(contender.load())
        hidden.grad = weight.grad = None
        loaded[0](hidden, weight, target).backward()

    return run


def products(hidden: Tensor, weight: Tensor, chunk: int = 4096) -> Callable[[], object]:
    """h Wᵀ, E W and Eᵀh of chunks, in the dtype of the operands with reused buffers."""
    h_TD, w_VD = hidden.detach(), weight.detach()

    def run() -> None:
        e_CV = torch.empty(min(chunk, len(h_TD)), len(w_VD), dtype=h_TD.dtype, device=h_TD.device)
        dh_CD, dw_VD = torch.empty_like(h_TD[: len(e_CV)]), torch.zeros_like(w_VD)
        for start in range(0, len(h_TD), chunk):
            h_CD = h_TD[start : start + chunk]
            rows = slice(0, len(h_CD))
            torch.mm(h_CD, w_VD.t(), out=e_CV[rows])
            torch.mm(e_CV[rows], w_VD, out=dh_CD[rows])
            dw_VD.addmm_(e_CV[rows].t(), h_CD)

    return run


def elapsed_ms(device: torch.device, run: Callable[[], object]) -> float:
    """Milliseconds of one call, by events on the stream of the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    """Largest allocation during one call beyond what is held before it; None without a GPU."""
    if device.type != "cuda":
        run()
        return None
    clear(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def clear(device: torch.device) -> None:
    """Give back what is held for nobody."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
