"""Quantities of a loss on the device against the fp64 definition on the CPU, and how far they may be off.

The definition is that of the tests (`tests/laws/definitions.py`), which shares no code with the package. It takes the
operands after they were rounded to their dtype. Gradients come in the dtype of the operands: one rounding of them is in
every bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import zloss
from benchmarks.gpu.record import Checked
from tests.laws.definitions import Case, relative_error, upstream_like
from zloss.head.options import Backend, Products

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance of neighboring numbers, relative to them, at most."""
FP32 = 1e-5
"""fp32 statistics: sums of some thousand terms, and an `exp` that is off by a few ulps on a GPU."""
THROUGH_PRODUCTS = ("gain", "gain_centered", "entropy", "total source", "z source")
"""fp32 quantities in which the rounding of E shows."""
GRADIENTS = ("hidden.grad", "weight.grad", "bias.grad", "logits.grad")


@dataclass(frozen=True)
class Way:
    """One way through the package."""

    dtype: torch.dtype
    """Dtype of the operands in the products."""
    backend: Backend
    products: Products
    autocast: bool = False
    """Whether operands are fp32 masters that autocast rounds."""
    gain_in_value: bool = False
    """Whether the value of the loss depends on the gain."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def bound(self, quantity: str, device: torch.device) -> float:
        """Largest relative error of a quantity."""
        narrow = self.dtype != torch.float32 and self.backend != "dense"
        rounded_once = 0.0 if self.autocast else ROUNDING[self.dtype]
        products: Products = self.products
        if products == "auto":
            products = "operand" if device.type == "cuda" else "fp32"
        inner = {"operand": 1.25 * ROUNDING[self.dtype], "fp32": 0.0}[products] if narrow else 0.0
        if quantity in GRADIENTS:
            return FP32 + inner + rounded_once
        through_products = quantity in THROUGH_PRODUCTS or (self.gain_in_value and quantity in ("loss", "auxiliary"))
        return FP32 + (inner if through_products else 0.0)


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """The case with operands that are exact in `dtype`, still stored in fp64."""
    exact = {
        name: value.to(dtype).double()
        for name in ("hidden", "weight", "bias")
        if (value := getattr(case, name)) is not None
    }
    weight = None if case.token_weight is None else case.token_weight.float().double()
    return dataclasses.replace(case, **exact, token_weight=weight)


def on_device(case: Case, way: Way, device: torch.device, chunk_size: int | None) -> dict[str, Tensor]:
    """Loss, parts, gradients and statistics as the package computes them on the device, brought to the CPU."""
    stored = torch.float32 if way.autocast else way.dtype

    def leaf(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.to(device, stored).requires_grad_()

    hidden, weight, bias = leaf(case.hidden), leaf(case.weight), leaf(case.bias)
    assert hidden is not None
    assert weight is not None
    token_weight = None if case.token_weight is None else case.token_weight.to(device, torch.float32)
    options: dict[str, Any] = {**case.options(), "bias": bias, "token_weight": token_weight}
    if way.backend != "dense":
        options |= {"chunk_size": chunk_size, "products": way.products}
    with torch.autocast(device.type, way.dtype, enabled=way.autocast):
        out = zloss.head_loss(
            hidden,
            weight,
            case.target.to(device),
            case.objective,
            backend=way.backend,
            **options,
        )
    # fp16 gradients of a mean lie below the range of fp16, as in training: a loss scale keeps them in it.
    scale = (1024.0 if case.reduction == "mean" else 16.0) if stored == torch.float16 else 1.0
    out.loss.backward(scale * upstream_like(out.loss.cpu()).to(device))
    found = {
        "loss": out.loss.detach(),
        "cross_entropy": out.cross_entropy,
        "auxiliary": out.auxiliary,
        "log_z": out.stats.log_z,
        "gain": out.stats.gain,
        "p_norm": out.stats.p_norm,
        "entropy": out.stats.entropy,
        "mu": out.stats.mu,
        "gain_centered": out.stats.gain_centered,
    }
    for name, operand in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if operand is not None:
            assert operand.grad is not None
            found[f"{name}.grad"] = operand.grad.double() / scale
    return {name: value.double().cpu() for name, value in found.items() if value is not None}


def compared(
    law: str, case: str, way: Way, device: torch.device, run: Callable[[], tuple[dict[str, Tensor], dict[str, Tensor]]]
) -> Checked:
    """The worst quantity of (found, wanted); an exception is a case that does not hold."""
    try:
        found, wanted = run()
    except Exception as raised:  # whatever a device can raise is a finding about it
        problem = f"{type(raised).__name__}: {str(raised).strip().partition(chr(10))[0]}"
        return Checked(law, case, way.dtype_name, way.backend, way.products, "", None, 0.0, problem)
    worst = None
    for name in sorted(found.keys() & wanted.keys()):
        bound, error = way.bound(name, device), relative_error(found[name], wanted[name])
        known = error if math.isfinite(error) else None
        one = Checked(law, case, way.dtype_name, way.backend, way.products, name, known, bound)
        if known is None:
            return one
        if worst is None or error / bound > (worst.error or 0.0) / worst.bound:
            worst = one
    assert worst is not None, "nothing in common to compare"
    return worst
