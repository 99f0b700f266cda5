"""Values per second of each accumulator, and the peak memory of 100 million values through one statistic's full set.

    python benchmarks/bench_streaming.py [--values 100000000] [--skip-memory]

The set is Moments, Quantiles at its default exact limit, Histogram, TopTokens and HashSample. The stream is made in
batches of 2^16 on the fly, so the process holds one batch of it. Peak memory is the growth of the process's resident
set over its size after imports and one warm-up batch, in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from ceilings import Figure, print_figures
from memory import status_mb

from zloss.streaming import CoMoments, Count, HashSample, Histogram, Moments, Quantiles, TopTokens

BATCH = 1 << 16


class FullSet:
    """One statistic's accumulators, fed together."""

    def __init__(self) -> None:
        self.moments, self.quantiles, self.histogram = Moments(), Quantiles(), Histogram()
        self.top = TopTokens(100, integers=["block"], floats=["log_z"])
        self.sample = HashSample(5000, floats=["x", "y"])

    def update(self, x: torch.Tensor, position: torch.Tensor) -> None:
        for accumulator in (self.moments, self.quantiles, self.histogram):
            accumulator.update(x)
        self.top.update(x, position=position, block=position // 256, log_z=x)
        self.sample.update(position, x=x, y=x)


def stream(values: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """Batches of a heavy-tailed stream (log-normal) with their positions."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, values, BATCH):
        size = min(BATCH, values - start)
        yield torch.randn(size, generator=generator, dtype=dtype).exp_(), torch.arange(start, start + size)


def memory(values: int, dtype: torch.dtype) -> bool:
    """Whether the ceiling is met. Run in a process of its own: the peak resident set only ever grows."""
    import datasketches  # noqa: F401  # the cost of loading a library is not the cost of the stream

    warm = FullSet()
    for batch in stream(BATCH, dtype):
        warm.update(*batch)
    del warm
    before, start, full = status_mb("VmHWM"), time.perf_counter(), FullSet()
    exact_peak = None
    for x, position in stream(values, dtype):
        full.update(x, position)
        if exact_peak is None and not full.quantiles.exact:
            exact_peak = status_mb("VmHWM") - before
    seconds, peak = time.perf_counter() - start, status_mb("VmHWM") - before
    p999 = full.quantiles.quantile(0.999)
    print(
        f"{values:,} {dtype} values: peak {peak:.1f} MB (at the switch to the sketch {exact_peak or 0:.1f} MB), "
        f"{seconds:.1f} s; p99.9 = {p999.value:.4f} in [{p999.lower:.4f}, {p999.upper:.4f}], of the distribution itself: 21.9824"
    )
    return print_figures([Figure(f"peak memory of {values:,} values", peak, 64.0, unit="MB")])


def speed(repetitions: int) -> None:
    """Best of several repetitions over 2^21 fp32 values in batches of 2^16."""
    batches = list(stream(1 << 21))
    sketching = {"exact_limit": 0}
    jobs: dict[str, tuple[Callable[[], object], Callable[..., None]]] = {
        "Count": (Count, lambda a, x, i: a.update(x)),
        "Moments": (Moments, lambda a, x, i: a.update(x)),
        "CoMoments": (CoMoments, lambda a, x, i: a.update(x, x)),
        "Quantiles, exact": (Quantiles, lambda a, x, i: a.update(x)),
        "Quantiles, sketch": (lambda: Quantiles(**sketching), lambda a, x, i: a.update(x)),
        "Histogram": (Histogram, lambda a, x, i: a.update(x)),
        "TopTokens": (lambda: TopTokens(100, floats=["x"]), lambda a, x, i: a.update(x, position=i, x=x)),
        "HashSample": (lambda: HashSample(5000, floats=["x", "y"]), lambda a, x, i: a.update(i, x=x, y=x)),
        "FullSet": (FullSet, lambda a, x, i: a.update(x, i)),
    }
    print(f"{'accumulator':20s} million values/s (best, worst of {repetitions})")
    for name, (make, feed) in jobs.items():
        seconds = []
        for _ in range(repetitions):
            accumulator, start = make(), time.perf_counter()
            for x, position in batches:
                feed(accumulator, x, position)
            seconds.append(time.perf_counter() - start)
        rates = np.sort((1 << 21) / np.array(seconds) / 1e6)
        print(f"{name:20s} {rates[-1]:8.1f} {rates[0]:8.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=100_000_000)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--memory-only", action="store_true", help="measure in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_only:
        return 0 if memory(options.values, getattr(torch, options.dtype)) else 1
    speed(options.repetitions)
    if options.skip_memory:
        return 0
    command = [sys.executable, __file__, "--memory-only", "--values", str(options.values), "--dtype", options.dtype]
    sys.stdout.flush()
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
