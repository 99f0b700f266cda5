"""Modeled time and memory of our head loss on GPUs, from the operations it issues. Not a measurement, and no claim about peers.

    python benchmarks/roofline.py                          # all shapes; A100, H100, H200
    python benchmarks/roofline.py --tokens 16384 --width 4096 --vocab 131072

The operations are traced on the meta device from the code that would run (needs triton). An operation takes the longer of two
times: its floating-point operations at 69 % of the peak of their dtype, and its bytes at the peak bandwidth; operations follow
one another. The 69 % is calibrated: cuBLAS reached 684 of 989 TFLOP/s in three products of a head on an H200. The
bandwidth is not calibrated, and launches and occupancy are left out, so the time of our own kernels is a lower bound. An
earlier version also modeled other packages: it predicted 61.6 ms for Liger's Triton path where 185.5 ms were measured, so a
ratio to a peer can only come from a measurement (`make gpu`). Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from ceilings import Figure, print_figures
from traced_operations import Operation, Trace, head_problem, trace_head_loss

from zloss.head.options import Products

GB = 1e9
EFFICIENCY = 684 / 989
"""Share of the peak that cuBLAS reaches: 18.9 ms for three bf16 products of T = 4096, D = 4096, V = 128256 on an H200."""


@dataclass(frozen=True)
class Device:
    """Peak figures of a card from its datasheet, without sparsity, in operations and bytes per second."""

    name: str
    narrow: float
    """bf16 and fp16 on tensor cores, fp32 sums."""
    single: float
    """fp32, without TF32: torch's default."""
    bandwidth: float

    def seconds(self, operations: Iterable[Operation]) -> float:
        return sum(max(o.flops / (EFFICIENCY * self._peak(o)), o.bytes / self.bandwidth) for o in operations)

    def _peak(self, operation: Operation) -> float:
        return self.narrow if operation.operand in (torch.bfloat16, torch.float16) else self.single


DEVICES = (
    Device("A100", 312e12, 19.5e12, 2.039e12),  # A100 80GB SXM, datasheet of 2021
    Device("H100", 989e12, 67e12, 3.35e12),  # H100 SXM, datasheet of 2023
    Device("H200", 989e12, 67e12, 4.8e12),  # H200 SXM, datasheet of 2023
)
PRODUCTS = "three 16-bit products"
OPERAND = "zloss, operand"
SHAPE = (16384, 4096, 131072)
"""T, D, V at which the limits apply."""


def ours(tokens: int, width: int, vocab: int, dtype: torch.dtype, products: Products) -> Trace:
    return trace_head_loss(head_problem(tokens, width, vocab, products, dtype))


def three_products(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> Trace:
    """The products alone, without any traffic: what no loss of hidden states can do without."""
    one = Operation("product", 2 * tokens * width * vocab, dtype, 0, (tokens, width, vocab))
    return Trace((one,) * 3, 0, 0)


def traces_of(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> dict[str, Trace]:
    shape = (tokens, width, vocab, dtype)
    return {PRODUCTS: three_products(*shape), OPERAND: ours(*shape, "operand"), "zloss, fp32": ours(*shape, "fp32")}


def print_shape(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> dict[str, Trace]:
    traces = traces_of(tokens, width, vocab, dtype)
    floors = [device.seconds(traces[PRODUCTS].operations) for device in DEVICES]
    print(f"\nmodel, T={tokens} D={width} V={vocab} {str(dtype).removeprefix('torch.')}\n")
    heads = " | ".join(f"{device.name} ms | to products" for device in DEVICES)
    print(f"| {'':<24} | {heads} | peak GB | beyond dW, dh GB |\n|---|{'--:|' * (2 * len(DEVICES) + 2)}")
    for name, trace in traces.items():
        times = [device.seconds(trace.operations) for device in DEVICES]
        cells = " | ".join(f"{1e3 * t:7.1f} | {t / floor:8.2f}" for t, floor in zip(times, floors, strict=True))
        print(f"| {name:<24} | {cells} | {trace.peak / GB:7.2f} | {trace.beyond / GB:6.2f} |")
    return traces


def figures(traces: dict[str, Trace]) -> list[Figure]:
    """The limits at `SHAPE`."""
    found = []
    for device in DEVICES:
        ratio = device.seconds(traces[OPERAND].operations) / device.seconds(traces[PRODUCTS].operations)
        found.append(Figure(f"{device.name}: operand / three 16-bit products", ratio, 1.3))
    rest = traces[OPERAND].beyond - traces[OPERAND].copies
    return [*found, Figure("beyond dW, dh and 16-bit copies of W", rest / GB, 1.5, unit="GB")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[16384, 65536])
    parser.add_argument("--width", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--vocab", type=int, nargs="*", default=[32768, 131072, 262144])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    print("A model of issued operations, its products calibrated on cuBLAS. Nothing of ours was measured on a GPU.")
    met = True
    for shape in itertools.product(arguments.tokens, arguments.width, arguments.vocab):
        traces = print_shape(*shape, dtype)
        if shape == SHAPE:
            print()
            met = print_figures(figures(traces))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
