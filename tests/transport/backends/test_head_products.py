"""The product of 16-bit operands with an fp32 result, which only CUDA has: what can be said of it without one."""

from __future__ import annotations

import pytest
import torch

from zloss.transport.backends.head_products import HeadProducts


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_16_bit_operands_give_fp32_logits(weight_dtype: torch.dtype) -> None:
    """Shapes and dtypes as PyTorch itself infers them; a head kept in fp32 is rounded as autocast would."""
    rounding = torch.bfloat16 if weight_dtype == torch.float32 else None
    head = HeadProducts(torch.empty(11, 4, dtype=weight_dtype, device="meta"), torch.float32, rounding)
    hidden, out = torch.empty(3, 4, dtype=torch.bfloat16, device="meta"), torch.empty(2, 3, 11, device="meta")[0]
    head.narrow_logits_(hidden, out)
    assert out.shape == (3, 11)
    assert out.dtype == torch.float32
    with pytest.raises(RuntimeError, match="reduction dim"):
        head.narrow_logits_(hidden.t(), out)


def test_without_cuda_operands_are_converted() -> None:
    weight = torch.randn(11, 4).bfloat16()
    assert not HeadProducts(weight, torch.float32, None).takes_narrow(torch.randn(3, 4).bfloat16())
