"""16-bit products through the Triton backend: the same numbers as the chunked backend, whose errors are held elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import zloss
from tests.laws.definitions import Case, make_case, measured, reference, relative_error
from zloss.head import triton as ops

BF16 = torch.bfloat16
OPTIONS = {
    "plain": {},
    "bias, ignored, padding, scale": {"with_bias": True, "with_ignored": True, "valid_vocab": 41, "logit_scale": -1.75},
    "softcap": {"softcap": 3.0, "logit_scale": 2.0, "with_bias": True},
    "per token": {"reduction": "none", "with_weights": True},
}


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "STATISTICS_BLOCK", 32)
    monkeypatch.setattr(ops, "SOURCE_BLOCK", 32)


def narrow_case(name: str, dtype: torch.dtype) -> Case:
    case = make_case(zloss.GainAwareZLoss(0.7, beta=0.3), tokens=6, **OPTIONS[name])  # type: ignore[arg-type]
    tensors = {field: getattr(case, field) for field in ("hidden", "weight", "bias")}
    return dataclasses.replace(case, **{k: v.to(dtype).double() for k, v in tensors.items() if v is not None})


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_triton_is_chunked(name: str, dtype: torch.dtype) -> None:
    case = narrow_case(name, dtype)
    with torch.autocast("cpu", dtype):
        got, twin = (measured(case, backend, 4, torch.float32, products="operand") for backend in ("triton", "chunked"))
    truth = reference(case)
    for key in got.keys() & truth.keys():
        # exp differs by an ulp between the two, which a 16-bit rounding may turn into one step of one entry.
        assert relative_error(got[key], twin[key]) <= 2e-3, key
        assert relative_error(got[key], truth[key]) <= 5e-3, key


def test_the_source_is_the_one_that_is_applied() -> None:
    case = narrow_case("bias, ignored, padding, scale", BF16)
    tensors = {field: getattr(case, field).to(BF16) for field in ("hidden", "weight", "bias")}
    options = case.options() | {"bias": tensors.pop("bias"), "products": "operand"}
    for part in ("z", "total"):
        got, twin = (
            zloss.head_source(
                **tensors, target=case.target, objective=case.objective, part=part, backend=backend, **options
            )
            for backend in ("triton", "chunked")
        )
        assert relative_error(got, twin) <= 1e-3
        assert not got[case.target == -100].any()


def test_a_buffer_for_the_weight_gradient() -> None:
    case = narrow_case("plain", BF16)
    leaves = [getattr(case, field).to(BF16).requires_grad_() for field in ("hidden", "weight")]
    buffers = [torch.zeros(leaves[1].shape) for _ in range(2)]
    for buffer, backend in zip(buffers, ("triton", "chunked"), strict=True):
        out = zloss.head_loss(
            *leaves, case.target, case.objective, backend=backend, products="operand", weight_grad_buffer=buffer
        )
        out.loss.backward()
    assert leaves[1].grad is None
    assert relative_error(*buffers) <= 2e-3
