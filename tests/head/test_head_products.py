"""The products with the head: what a GPU issues, shown on the meta device, and what is converted elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.head.issued_products import issued_products
from zloss.head.products import HeadProducts, plan_products, product_exp


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_16_bit_operands_give_fp32_logits(weight_dtype: torch.dtype) -> None:
    """Shapes and dtypes as PyTorch itself infers them; a head kept in fp32 is rounded as autocast would."""
    rounding = torch.bfloat16 if weight_dtype == torch.float32 else None
    plan = plan_products(
        "auto",
        device_type="cuda",
        hidden=torch.bfloat16,
        weight=weight_dtype,
        rounding=rounding,
        torch_version=(2, 13),
        hip=False,
    )
    weight = torch.empty(11, 4, dtype=weight_dtype, device="meta")
    head = HeadProducts(weight, torch.float32, rounding, plan)
    hidden, out = torch.empty(3, 4, dtype=torch.bfloat16, device="meta"), torch.empty(2, 3, 11, device="meta")[0]
    head.logits_(hidden, out)
    assert out.shape == (3, 11)
    assert out.dtype == torch.float32
    with pytest.raises(RuntimeError, match="reduction dim"):
        head.logits_(hidden.t(), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_tensor_cores_factors_are_converted_and_the_product_is_that_of_the_rounded_e(
    dtype: torch.dtype,
) -> None:
    g = torch.Generator().manual_seed(0)
    weight, e = torch.randn(11, 4, generator=g).to(dtype), torch.rand(3, 11, generator=g)
    plan = plan_products("operand", device_type="cpu", hidden=dtype, weight=dtype)
    assert not plan.takes_16_bit
    rounded = product_exp(e, plan)
    assert rounded.dtype == torch.float16
    with issued_products() as products:
        got = HeadProducts(weight, torch.float32, None, plan).back_project(rounded)
    assert {product.operand for product in products} == {torch.float32}
    want = rounded.double() @ weight.double() / plan.exp_scale
    assert (got.double() - want).abs().max() <= 1e-6 * want.abs().max()
    exact = e.double() @ weight.double()
    error = float((got.double() - exact).norm() / exact.norm())
    assert error <= 2**-11
