"""The roofline model: it sees every V-wide operation, and its bars are held."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install 'zloss[triton]'")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BF16 = torch.bfloat16
DECLARED = {
    # V-wide operation that the dispatcher sees: the name under which it is declared or counted
    "aten.mm.dtype_out": "h Wᵀ",
    "aten.addmm.dtype_out": "Eᵀ(s∘h)",
    "zloss.row_sums.default": "row statistics",
    "zloss.exp_parts_.default": "E in 16 bits",
    "aten.sum.dim_IntList": "w̄",
    "aten.linalg_vector_norm.default": "largest entry of W",
    "aten.mul.out": "fp16 copy of W",
    "aten.addcmul.out": "dW in the unit of the gradient, without its uniform part",
    "aten.mul.Tensor": "upstream gradient",
    "aten.new_zeros.default": None,  # makes a [C, D] tensor like a V-wide one, which it does not read
}


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("roofline")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("products", ["operand", "split"])
def test_no_v_wide_operation_escapes_the_model(roofline: ModuleType, products: str) -> None:
    problem = roofline.head_problem(3000, 64, 4099, products, BF16)
    trace, wide = roofline.trace_head_loss(problem)
    assert wide == set(DECLARED)
    names = {operation.name for operation in trace.operations}
    assert {name for name in DECLARED.values() if name} <= names
    chunks = len([o for o in trace.operations if o.name == "h Wᵀ"])
    for name, times in (("E W", {"split": 2}.get(products, 1)), ("Eᵀ(s∘h)", {"split": 3}.get(products, 1))):
        assert len([o for o in trace.operations if o.name == name]) == times * chunks


def test_the_bars_at_the_shape_they_are_held_at(roofline: ModuleType) -> None:
    needed = (roofline.BOUND, roofline.OURS, roofline.LIGER32)
    traces = {name: roofline.SCHEMES[name](*roofline.BAR, BF16) for name in needed}
    for figure in roofline.figures(traces):
        assert figure.met, figure


def test_fp32_products_and_small_chunks_are_far_from_the_bound(roofline: ModuleType) -> None:
    """The bars can fail: the scheme before this option misses them by an order of magnitude."""
    before, bound = (trace(16384, 4096, 131072, BF16) for trace in (roofline.before, roofline.three_products))
    for device in roofline.DEVICES:
        assert device.seconds(before.operations) > 8 * device.seconds(bound.operations)


def test_bytes_of_a_chunk_are_those_of_the_design(roofline: ModuleType) -> None:
    """18·T·V bytes for z and E: written 4 + 2, read twice in fp32 and twice in 16 bits."""
    tokens, width, vocab = 16384, 64, 32768
    trace, _ = roofline.trace_head_loss(roofline.head_problem(tokens, width, vocab, "operand", BF16))
    wide = {"h Wᵀ", "row statistics", "E in 16 bits", "E W", "Eᵀ(s∘h)"}
    moved = sum(operation.bytes for operation in trace.operations if operation.name in wide)
    assert moved == pytest.approx(18 * tokens * vocab, rel=0.02)
