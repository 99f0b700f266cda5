"""Which products run how: read from the plan without a GPU, and from the operations that the plan makes the code issue."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zloss
from zloss.head.arguments import HeadProblem, prepare_targets
from zloss.head.chunked import run_chunks
from zloss.head.options import HeadOptions
from zloss.head.products import HeadProducts, ProductPlan, Version, plan_products
from zloss.head.rows import TorchRows
from zloss.head.sharded import whole_vocabulary
from zloss.statistics import plan_statistics

NARROW = (torch.bfloat16, torch.float16)
TOKENS, WIDTH, VOCAB = 5, 16, 48


class Product(NamedTuple):
    operand: torch.dtype
    """Dtype of the factors."""
    shape: tuple[int, int, int]
    """[M, K, N] of [M, K] @ [K, N]."""


class IssuedProducts(TorchDispatchMode):
    """Records the matrix products issued inside the block, as the dispatcher sees them: on the meta device too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(("aten.mm", "aten.addmm")):
            left, right = [value for value in args if isinstance(value, torch.Tensor)][-2:]
            assert left.dtype == right.dtype
            self.seen.append(Product(left.dtype, (left.shape[0], left.shape[1], right.shape[1])))
        return func(*args, **(kwargs or {}))


def cuda_plan(
    option: str, dtype: torch.dtype, version: Version = (2, 13), *, hip: bool = False, **dtypes: torch.dtype
) -> ProductPlan:
    known = {"hidden": dtype, "weight": dtype} | dtypes
    return plan_products(option, device_type="cuda", torch_version=version, hip=hip, **known)  # type: ignore[arg-type]


def wide_factors(plan: ProductPlan) -> list[torch.dtype | None]:
    """Of h Wᵀ, E W and Eᵀ(x∘h), as the plan has them."""
    return [plan.operand, plan.factor, plan.factor] if plan.takes_16_bit else [plan.compute] * 3


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("option", ["auto", "operand"])
@pytest.mark.parametrize(("version", "hip"), [((2, 8), False), ((2, 9), False), ((2, 13), False), ((2, 10), True)])
def test_on_cuda_no_product_of_16_bit_operands_is_fp32(
    dtype: torch.dtype, option: str, version: Version, hip: bool
) -> None:
    plan = cuda_plan(option, dtype, version, hip=hip)
    assert wide_factors(plan) == [dtype, torch.float16, torch.float16]
    assert plan.kind == "operand"
    # A master weight in fp32 under autocast has the same plan as one in 16 bits.
    assert cuda_plan(option, torch.float32, version, hip=hip, rounding=dtype) == plan


def test_the_plan_where_out_dtype_is_missing() -> None:
    assert cuda_plan("auto", torch.bfloat16, (2, 9), hip=True).kind == "fp32"
    emulated = cuda_plan("operand", torch.bfloat16, (2, 9), hip=True)
    assert (emulated.kind, emulated.takes_16_bit) == ("operand", False)
    assert not cuda_plan("auto", torch.bfloat16, (2, 9)).fp32_accumulator
    assert cuda_plan("auto", torch.bfloat16, (2, 10)).fp32_accumulator


def test_elsewhere_and_for_other_operands_auto_is_fp32() -> None:
    for option, dtype in itertools.product(("auto", "operand"), (torch.float32, torch.float64)):
        plan = cuda_plan(option, dtype)
        assert (plan.kind, plan.compute, wide_factors(plan)) == ("fp32", dtype, [dtype] * 3)
    mixed = cuda_plan("operand", torch.bfloat16, weight=torch.float32)
    assert (mixed.kind, mixed.operand) == ("fp32", None)
    for device in ("cpu", "mps", "xpu"):
        assert plan_products("auto", device_type=device, hidden=torch.bfloat16, weight=torch.bfloat16).kind == "fp32"


def issued(plan: ProductPlan, dtype: torch.dtype, rounding: torch.dtype | None = None) -> list[Product]:
    """What a head loss with gradients issues under a plan, traced on the meta device."""
    options = HeadOptions(zloss.GainAwareZLoss(1e-4), chunk_size=3)
    hidden, weight = (torch.empty(n, WIDTH, dtype=dtype, device="meta") for n in (TOKENS, VOCAB))
    bias = torch.empty(VOCAB, dtype=dtype, device="meta")
    target = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    problem = HeadProblem(
        hidden_TD=hidden,
        weight_VD=weight,
        bias_V=bias,
        targets=prepare_targets(target, target.shape, VOCAB, options, torch.float32),
        shard=whole_vocabulary(VOCAB),
        dtype=torch.float32,
        rounding=rounding,
        nonfinite_mask_T=None,
        plan=plan_statistics("full", needs_mu=False, needs_gain=True, has_mu=True, has_head=True, has_hidden=True),
        products=plan,
        options=options,
    )
    with torch.no_grad(), IssuedProducts() as products:
        run = run_chunks(problem, (True, True, True), problem.targets.weight_T, TorchRows(None, plan=plan))
    hidden_dtype, weight_dtype, bias_dtype = (grad.dtype for grad in run.gradients if grad is not None)
    assert (hidden_dtype, bias_dtype) == (torch.float32, torch.float32)
    assert weight_dtype == torch.float32  # rounded in the backward pass
    return products.seen


@pytest.mark.parametrize("version", [(2, 9), (2, 13)])
@pytest.mark.parametrize(("dtype", "rounding"), [(d, None) for d in NARROW] + [(torch.float32, torch.bfloat16)])
def test_the_code_issues_the_planned_products(
    version: Version, dtype: torch.dtype, rounding: torch.dtype | None
) -> None:
    """PyTorch itself checks the dtypes of factors, result and accumulator on the meta device."""
    narrow = rounding or dtype
    known = {"rounding": rounding} if rounding else {}
    plan = cuda_plan("operand", dtype, version, **known)
    products = issued(plan, dtype, rounding)
    assert {product.operand for product in products} == {narrow, torch.float16}
    # V is the last axis of h Wᵀ, the inner one of E W and the first of Eᵀ(x∘h).
    for axis, factor in zip((2, 1, 0), wide_factors(plan), strict=True):
        same = [product for product in products if product.shape[axis] == VOCAB and WIDTH in product.shape]
        assert [product.operand for product in same] == [factor] * 2, axis  # two chunks


def test_the_test_fails_when_a_product_is_made_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cuda_plan("operand", torch.bfloat16)
    assert torch.float32 in wide_factors(replace(plan, kind="fp32"))
    right = HeadProducts.back_project

    def in_fp32(self: HeadProducts, e_CV: torch.Tensor) -> torch.Tensor:
        self._plan = replace(plan, takes_16_bit=False)
        try:
            return right(self, e_CV)
        finally:
            self._plan = plan

    monkeypatch.setattr(HeadProducts, "back_project", in_fp32)
    assert {product.operand for product in issued(plan, torch.bfloat16)} == {
        torch.bfloat16,
        torch.float16,
        torch.float32,
    }
