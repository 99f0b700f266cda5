"""Which matrix products of a head loss run in which dtype: a pure function of devices, dtypes, versions and the option.

A head loss has three products with a V-wide factor: the logits h Wᵀ, E W with E = exp(z − m), and Eᵀ(s∘h) with
s = w·a/S. `products` says in which dtype their factors are:

| option    | factors of E W and Eᵀ(s∘h)                          | products | error of the gradients  |
|-----------|-----------------------------------------------------|----------|-------------------------|
| "operand" | fp16                                                | 3        | ≤ 2⁻¹¹ of an entry of E |
| "fp32"    | fp32 (fp64 for fp64 operands)                       | 3        | fp32                    |
| "auto"    | "operand" on CUDA and ROCm for 16-bit operands, "fp32" elsewhere | |                         |

The logits product takes W and h as they are. The two others take fp16 also where W and h are bf16: tensor cores multiply
both at the same speed, E and s∘h have a known range, and fp16 has three bits more. For a bf16 head that takes one fp16
copy of W, scaled by a power of two, in which every entry above 2⁻²⁹ of the largest is exact.

Results and sums are fp32 under every option, and the logits are never stored in 16 bits. Operands that are not both of
one 16-bit dtype (after autocast) have fp32 products under every option. The dense backend ignores the option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from zloss.errors import UnknownNameError

Products = Literal["auto", "operand", "fp32"]
Kind = Literal["operand", "fp32"]

Version = tuple[int, int]
_OUT_DTYPE: Version = (2, 8)
"""From here on torch.mm and torch.addmm take `out_dtype` on CUDA (pytorch/pytorch#150812)."""
_OUT_DTYPE_ON_ROCM: Version = (2, 10)
"""From here on ROCm writes the fp32 result too (pytorch/pytorch#162600)."""
_FP32_ACCUMULATOR: Version = (2, 10)
"""From here on addmm(fp32, 16-bit, 16-bit, out_dtype=fp32) takes an fp32 accumulator (pytorch/pytorch#167931)."""


@dataclass(frozen=True)
class ProductPlan:
    """How the products of one loss run."""

    kind: Kind
    device_type: str
    """For which the plan was made; a trace on the meta device follows the plan of a GPU."""
    compute: torch.dtype
    """Dtype of logits, results and accumulators: fp32, or fp64 for fp64 operands."""
    operand: torch.dtype | None
    """The 16-bit dtype that h and W share after autocast, and that the logits product takes; None where they share none."""
    native: bool
    """16-bit factors are multiplied as they are. Otherwise they are converted first, which gives the same products."""
    fp32_accumulator: bool
    """A native product can be added to an fp32 accumulator in one call; otherwise it is written and then added."""

    @property
    def narrow(self) -> bool:
        """Whether E and s∘h are rounded to fp16 for their products."""
        return self.kind == "operand"

    @property
    def factor(self) -> torch.dtype:
        """Dtype in which E, s∘h and the W of E W are stored for their products."""
        return torch.float16 if self.narrow else self.compute

    @property
    def exp_scale(self) -> float:
        """Power of two by which the stored E is multiplied. fp16 has full precision from 2⁻¹⁴ on: with 2¹⁵, down to
        E = 2⁻²⁹, and p ≤ E, so that every p above 2e-9 keeps its digits."""
        return 2.0**15 if self.narrow else 1.0


def check_products(products: str) -> None:
    """The name is one of the options'."""
    if not isinstance(products, str) or products not in get_args(Products):
        raise UnknownNameError("products", products, get_args(Products))


def plan_products(
    option: Products,
    *,
    device_type: str,
    hidden: torch.dtype,
    weight: torch.dtype,
    rounding: torch.dtype | None = None,
    torch_version: Version | None = None,
    hip: bool | None = None,
) -> ProductPlan:
    """The plan for operands of these dtypes; `rounding` is the autocast dtype. Version and hip: None reads torch's own.

    >>> bf16 = torch.bfloat16
    >>> plan_products("auto", device_type="cuda", hidden=bf16, weight=bf16, torch_version=(2, 13), hip=False).kind
    'operand'
    """
    version = _installed_version() if torch_version is None else torch_version
    on_rocm = torch.version.hip is not None if hip is None else hip
    compute = torch.float64 if torch.float64 in (hidden, weight) else torch.float32
    dtypes = {hidden, weight} if rounding is None else {rounding}
    shared = dtypes.pop() if len(dtypes) == 1 else compute
    operand = shared if shared in (torch.bfloat16, torch.float16) else None
    native = (
        device_type == "cuda" and operand is not None and version >= (_OUT_DTYPE_ON_ROCM if on_rocm else _OUT_DTYPE)
    )
    kind: Kind
    if operand is None:
        kind = "fp32"
    elif option == "auto":
        kind = "operand" if native else "fp32"
    else:
        kind = option
    return ProductPlan(kind, device_type, compute, operand, native, native and version >= _FP32_ACCUMULATOR)


def fp32_plan(compute: torch.dtype = torch.float32, device_type: str = "cpu") -> ProductPlan:
    """Every product in compute precision, from factors that are converted to it."""
    return ProductPlan("fp32", device_type, compute, None, native=False, fp32_accumulator=False)


def _installed_version() -> Version:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
