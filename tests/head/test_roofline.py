"""The roofline model: which V-wide operations the loss issues, its limits and its calibration."""

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
WIDE = {
    # every operation that reads or writes a V-wide matrix
    "aten.mm.dtype_out": "h Wᵀ",
    "aten.addmm.dtype_out": "E W, Eᵀ(x∘h)",
    "zloss.row_sums.default": "row statistics",
    "zloss.narrow_exp_.default": "E in 16 bits",
    "aten.sum.dim_IntList": "w̄",
    "aten.linalg_vector_norm.default": "largest entry of W",
    "aten.mul.out": "fp16 copy of W, upstream gradient",
    "aten.addcmul.out": "dW in the unit of the gradient, without its uniform part",
}


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("roofline")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_the_loss_issues_these_v_wide_operations_and_no_other(roofline: ModuleType) -> None:
    tokens, width, vocab = 3000, 64, 4099
    trace = roofline.trace_head_loss(roofline.head_problem(tokens, width, vocab, "operand", BF16))
    assert trace.wide == set(WIDE)
    products = [operation.shape for operation in trace.operations if operation.flops]
    chunks = [shape for shape in products if shape[2] == vocab]
    for axis in (2, 1, 0):  # h Wᵀ, E W, Eᵀ(x∘h): one each per chunk
        assert len([shape for shape in products if shape[axis] == vocab]) == len(chunks)
    assert len([shape for shape in products if vocab in shape]) == 3 * len(chunks)
    for name in ("zloss.row_sums.default", "zloss.narrow_exp_.default"):
        assert len([operation for operation in trace.operations if operation.name == name]) == len(chunks)


def test_the_limits_at_the_shape_they_apply_at(roofline: ModuleType) -> None:
    traces = roofline.traces_of(*roofline.SHAPE, BF16)
    for figure in roofline.figures(traces):
        assert figure.met, figure
    # The limits can fail: fp32 products exceed them by an order of magnitude.
    for device in roofline.DEVICES:
        bound = device.seconds(traces[roofline.PRODUCTS].operations)
        assert device.seconds(traces["zloss, fp32"].operations) > 8 * bound


def test_products_are_calibrated_on_the_published_time_of_cublas(roofline: ModuleType) -> None:
    h200 = next(device for device in roofline.DEVICES if device.name == "H200")
    seconds = h200.seconds(roofline.three_products(4096, 4096, 128256, BF16).operations)
    assert 1e3 * seconds == pytest.approx(18.9, abs=0.05)


def test_bytes_of_a_chunk_are_those_of_the_design(roofline: ModuleType) -> None:
    """18·T·V bytes for z and E: written 4 + 2, read twice in fp32 and twice in 16 bits."""
    tokens, width, vocab = 16384, 64, 32768
    trace = roofline.trace_head_loss(roofline.head_problem(tokens, width, vocab, "operand", BF16))
    wide = {"aten.mm.dtype_out", "aten.addmm.dtype_out", "zloss.row_sums.default", "zloss.narrow_exp_.default"}
    moved = sum(operation.bytes for operation in trace.operations if operation.name in wide)
    assert moved == pytest.approx(18 * tokens * vocab, rel=0.02)
