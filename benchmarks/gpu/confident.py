"""Z at λ = 1e-4 survives 16-bit products on confident tokens.

A quarter of the tokens has p_y > 0.998. Z is the difference of the gradients with and without λ, from fp32 masters under
autocast, relative to fp64: at most 1e-2 in dh and in dW. The logits of the other tokens have standard deviation 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import zloss
from benchmarks.gpu.agreement import Way, compared
from benchmarks.gpu.record import Checked
from zloss.head.options import Backend, Products

TOKENS, WIDTH, VOCAB, PEAK = 256, 96, 16000, 21.0


def confident(device: torch.device, backends: tuple[Backend, ...]) -> Iterator[Checked]:
    """16-bit products, and fp32 products of the same 16-bit operands."""
    problem = confident_tokens(torch.bfloat16)
    exact = [_gradients(problem, objective, torch.float64, torch.device("cpu")) for objective in ON_AND_OFF]
    wanted = {name: exact[0][name] - exact[1][name] for name in exact[0]}
    for backend in (name for name in backends if name != "dense"):
        for products in KINDS:
            way = _Difference(torch.bfloat16, backend, products, autocast=True)
            run = partial(_differences, problem, way, device, wanted)
            yield compared("Z of confident tokens", "standard, λ = 1e-4", way, device, run)


KINDS: tuple[Products, ...] = ("operand", "fp32")
ON_AND_OFF = (zloss.StandardZLoss(1e-4), zloss.CrossEntropy())


class _Difference(Way):
    def bound(self, quantity: str, device: torch.device) -> float:
        return 1e-2


def confident_tokens(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, target) in `dtype`."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g)
    weight = torch.randn(VOCAB, WIDTH, generator=g) / WIDTH**0.5
    target = torch.randint(VOCAB, (TOKENS,), generator=g)
    rows = weight[target[: TOKENS // 4]]
    hidden[: TOKENS // 4] += PEAK * rows / rows.square().sum(1, keepdim=True)
    return hidden.to(dtype), weight.to(dtype), target


def _differences(
    problem: tuple[Tensor, Tensor, Tensor], way: Way, device: torch.device, wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with torch.autocast(device.type, way.dtype):
        on, off = (
            _gradients(problem, objective, torch.float32, device, backend=way.backend, products=way.products)
            for objective in ON_AND_OFF
        )
    return {name: on[name] - off[name] for name in on}, wanted


def _gradients(
    problem: tuple[Tensor, Tensor, Tensor],
    objective: zloss.Objective,
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> dict[str, Tensor]:
    hidden, weight = (tensor.to(device, dtype).requires_grad_() for tensor in problem[:2])
    loss = zloss.head_loss(hidden, weight, problem[2].to(device), objective, **options or {"backend": "dense"}).loss
    grads = torch.autograd.grad(loss, (hidden, weight))
    return {"hidden.grad": grads[0].double().cpu(), "weight.grad": grads[1].double().cpu()}
