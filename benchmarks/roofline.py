"""Predicted time and memory of the head loss on GPUs, from the operations it issues: a model, not a measurement.

    python benchmarks/roofline.py                          # all shapes, A100 and H100
    python benchmarks/roofline.py --tokens 16384 --width 4096 --vocab 131072

Time of an operation: the larger of its floating-point operations over the peak of their dtype and its bytes over the peak
bandwidth; operations follow one another. Launches, tile quantisation and what a real product misses of the peak are left
out, for us and for the peers alike. Ours is traced on the meta device from the code that would run (needs triton); the
peers are counted from their source. The command fails where a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from ceilings import Figure, print_figures
from roofline_peers import eager, liger, three_products, torch_linear
from traced_operations import Operation, Trace, Tracer, head_problem, trace_head_loss

from zloss.head.options import Products

GB = 1e9


@dataclass(frozen=True)
class Device:
    """Peak figures of a card, dense, in operations and bytes per second."""

    name: str
    narrow: float
    """bf16 and fp16 on tensor cores, fp32 sums."""
    single: float
    """fp32, without TF32: torch's default."""
    bandwidth: float

    def seconds(self, operations: Iterable[Operation]) -> float:
        return sum(max(o.flops / self._peak(o), o.bytes / self.bandwidth) for o in operations)

    def _peak(self, operation: Operation) -> float:
        return self.narrow if operation.operand in (torch.bfloat16, torch.float16) else self.single


DEVICES = (
    # NVIDIA A100 Tensor Core GPU datasheet (2021), A100 80GB SXM: BF16 312 TFLOPS, FP32 19.5 TFLOPS, 2,039 GB/s.
    Device("A100", 312e12, 19.5e12, 2.039e12),
    # NVIDIA H100 Tensor Core GPU datasheet (2023), H100 SXM: BF16 1,979 TFLOPS with sparsity, so 989 dense, FP32
    # 67 TFLOPS, 3.35 TB/s.
    Device("H100", 989e12, 67e12, 3.35e12),
)


def ours(
    tokens: int, width: int, vocab: int, dtype: torch.dtype, *, products: Products, chunk_size: int | None = None
) -> Trace:
    return trace_head_loss(head_problem(tokens, width, vocab, products, dtype, chunk_size))


def before(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> Trace:
    """The scheme before `products`: fp32 E, chunks of a CPU cache, and a pass that multiplied the logits by 1."""
    chunk = min(1024, max(32, 2**27 // (4 * vocab)))
    trace = ours(tokens, width, vocab, dtype, products="fp32", chunk_size=chunk)
    scaled = Operation("logits times 1", 0, None, 8 * tokens * vocab)
    return Trace((*trace.operations, scaled), trace.peak, trace.beyond)


BOUND, OURS, LIGER32 = "three 16-bit products (the bound)", "zloss, operand", "Liger, fp32 accumulators"
SCHEMES: dict[str, Tracer] = {
    BOUND: three_products,
    OURS: partial(ours, products="operand"),
    "zloss, fp32": partial(ours, products="fp32"),
    "zloss before: fp32 E, CPU chunks": before,
    "Liger, 16-bit accumulators (default)": partial(liger, accumulator=2),
    LIGER32: partial(liger, accumulator=4),
    "torch linear_cross_entropy (no Z)": torch_linear,
    "eager CE+Z": eager,
}
BAR = (16384, 4096, 131072)
"""The shape at which the bars are held."""


def print_shape(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> dict[str, Trace]:
    traces = {name: trace(tokens, width, vocab, dtype) for name, trace in SCHEMES.items()}
    floors = [device.seconds(traces[BOUND].operations) for device in DEVICES]
    print(f"\nmodel, T={tokens} D={width} V={vocab} {str(dtype).removeprefix('torch.')}\n")
    heads = " | ".join(f"{device.name} ms | of bound" for device in DEVICES)
    print(f"| {'':<38} | {heads} | peak GB | beyond dW, dh GB |\n|---|{'--:|' * (2 * len(DEVICES) + 2)}")
    for name, trace in traces.items():
        times = [device.seconds(trace.operations) for device in DEVICES]
        cells = " | ".join(f"{1e3 * t:7.1f} | {t / floor:8.2f}" for t, floor in zip(times, floors, strict=True))
        print(f"| {name:<38} | {cells} | {trace.peak / GB:7.2f} | {trace.beyond / GB:6.2f} |")
    return traces


def figures(traces: dict[str, Trace]) -> list[Figure]:
    """What is held at the shape BAR."""
    found = []
    for device in DEVICES:
        seconds = {name: device.seconds(traces[name].operations) for name in (BOUND, OURS, LIGER32)}
        found.append(Figure(f"{device.name}: operand / three 16-bit products", seconds[OURS] / seconds[BOUND], 1.3))
        against = seconds[OURS] / seconds[LIGER32]
        found.append(Figure(f"{device.name}: operand / Liger with fp32 accumulators", against, 1.0))
    rest = traces[OURS].beyond - traces[OURS].copies
    return [*found, Figure("beyond dW, dh and 16-bit copies of W", rest / GB, 1.5, unit="GB")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[16384, 65536])
    parser.add_argument("--width", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--vocab", type=int, nargs="*", default=[32768, 131072, 262144])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    print("A model from peak figures and issued operations. No figure here was measured on a GPU.")
    met = True
    for shape in itertools.product(arguments.tokens, arguments.width, arguments.vocab):
        traces = print_shape(*shape, dtype)
        if shape == BAR:
            print()
            met = print_figures(figures(traces))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
