"""A head that is divided over ranks: what moves and what it costs, as arithmetic; and small runs on gloo processes.

    python benchmarks/scaling.py                    # the arithmetic: V = 262,144 over 8 and 64 ranks
    python benchmarks/scaling.py --measure          # strong and weak scaling on 1, 2 and 4 CPU processes of this machine

The arithmetic is a model, not a measurement. Time of a step: products at the peak of the card, passes over V-wide buffers
at its bandwidth, collectives at the bandwidth of the link (a ring moves 2(n − 1)/n of an all-reduced tensor and (n − 1)/n of
a gathered one per rank), one after the other. Latencies are left out. Other packages are not modeled: a ratio to them has to be
measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Card:
    """Peak figures per card: NVIDIA H100 SXM datasheet (2023). Links: NVLink 900 GB/s both ways, so 450 one way; between
    machines one 400 Gb/s adapter per card."""

    products: float = 989e12
    bandwidth: float = 3.35e12
    inside: float = 450e9
    between: float = 50e9

    def link(self, ranks: int) -> float:
        """Eight cards share a machine; a ring over more is as fast as its slowest link."""
        return self.inside if ranks <= 8 else self.between


@dataclass(frozen=True)
class Shape:
    tokens: int
    width: int
    vocab: int
    ranks: int

    @property
    def rows(self) -> int:
        return -(-self.vocab // self.ranks)


@dataclass(frozen=True)
class Cost:
    """Of one rank and one forward and backward pass."""

    flops: float
    passes: float
    """Bytes read and written in V-wide buffers."""
    moved: float
    """Bytes sent per rank."""
    memory: float
    """Bytes of V-wide buffers that exist at once."""

    def seconds(self, card: Card, ranks: int) -> float:
        return self.flops / card.products + self.passes / card.bandwidth + self.moved / card.link(ranks)


def _ring(size: float, ranks: int) -> float:
    """Bytes per rank of an all-reduce."""
    return 2 * (ranks - 1) / ranks * size


def ours(shape: Shape, *, gain: bool, chunk: int = 1280) -> Cost:
    """Chunks of fp32 logits, E in 16 bits; nothing V wide is kept. The gain needs E W and W[y] apart: 2D per token."""
    t, d, v = shape.tokens, shape.width, shape.rows
    rows = _ring(t * d * 4 * (2 if gain else 1), shape.ranks)
    numbers = _ring(t * 4 * (4 if gain else 3), shape.ranks)
    # Logits written once and read twice in fp32, E written once and read by two products in 16 bits.
    return Cost(3 * 2 * t * d * v, t * v * (3 * 4 + 3 * 2), rows + numbers, chunk * v * (4 + 2))


def gathered(shape: Shape) -> Cost:
    """16-bit logits of all ranks gathered on each, then the loss in fp32 on whole rows; dh is summed in 16 bits."""
    t, d, v = shape.tokens, shape.width, shape.rows
    gather = (shape.ranks - 1) / shape.ranks * t * shape.vocab * 2
    passes = t * shape.vocab * (2 + 4 + 4 + 4 + 2)
    return Cost(3 * 2 * t * d * v, passes, gather + _ring(t * d * 2, shape.ranks), t * shape.vocab * (2 + 4))


SCHEMES = {
    "zloss, light statistics": lambda shape: ours(shape, gain=False),
    "zloss, all statistics": lambda shape: ours(shape, gain=True),
    "logits gathered": gathered,
}


def print_model(tokens: int, width: int, vocab: int) -> None:
    card = Card()
    for ranks in (8, 64):
        shape = Shape(tokens, width, vocab, ranks)
        print(f"\nmodel, not a measurement: T={tokens} D={width} V={vocab} over {ranks} ranks, bf16 head, H100\n")
        print("| scheme | Tflop per rank | V-wide GB read and written | GB moved per rank | V-wide GB at once | ms |")
        print("|---|--:|--:|--:|--:|--:|")
        for name, cost_of in SCHEMES.items():
            cost = cost_of(shape)
            numbers = (cost.flops / 1e12, cost.passes / GB, cost.moved / GB, cost.memory / GB)
            print(f"| {name} | {' | '.join(f'{n:.2f}' for n in numbers)} | {1e3 * cost.seconds(card, ranks):.2f} |")


def measure(tokens: int, width: int, vocab: int) -> None:
    """Strong: one vocabulary over more processes. Weak: as many rows per process."""
    print(f"\nCPU, gloo, one thread per process, {os.cpu_count()} cores: T={tokens} D={width}; best of 3\n")
    print("| processes | strong: V | ms | against one | weak: V | ms | against one |\n|--:|--:|--:|--:|--:|--:|--:|")
    first: tuple[float, float] | None = None
    for ranks in (1, 2, 4):
        strong, weak = (_launched(ranks, tokens, width, v) for v in (vocab, vocab // 4 * ranks))
        first = first or (strong, weak)
        print(
            f"| {ranks} | {vocab} | {1e3 * strong:.0f} | {strong / first[0]:.2f} "
            f"| {vocab // 4 * ranks} | {1e3 * weak:.0f} | {weak / first[1]:.2f} |",
            flush=True,
        )


def _launched(ranks: int, tokens: int, width: int, vocab: int) -> float:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, "--child", str(tokens), str(width), str(vocab)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return float(done.stdout.split()[-1])


def child(tokens: int, width: int, vocab: int) -> None:
    """One rank of a measured loss, forward and backward."""
    import torch
    import torch.distributed as dist

    import zloss

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    hidden, target = torch.randn(tokens, width), torch.randint(0, vocab, (tokens,))
    step = -(-vocab // ranks)
    rows = max(0, min(step, vocab - rank * step))
    weight = (0.1 * torch.randn(rows, width)).requires_grad_()
    hidden.requires_grad_()
    best = float("inf")
    for _ in range(4):
        dist.barrier()
        begun = time.perf_counter()
        zloss.head_loss(hidden, weight, target, zloss.CenteredZLoss(1e-4), group=dist.group.WORLD).loss.backward()
        dist.barrier()
        best = min(best, time.perf_counter() - begun)
    if rank == 0:
        print(best)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run on 1, 2 and 4 processes of this machine")
    parser.add_argument("--child", nargs=3, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
    elif arguments.measure:
        measure(tokens=512, width=256, vocab=65536)
    else:
        print_model(tokens=16384, width=4096, vocab=262144)
    return 0


if __name__ == "__main__":
    sys.exit(main())
