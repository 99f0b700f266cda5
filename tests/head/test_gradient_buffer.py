"""dW added to a buffer of the caller: the same numbers as a gradient, once, and never silently wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zloss
from zloss import errors

OBJECTIVE = zloss.CenteredZLoss(0.1)


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=g).to(dtype).requires_grad_() for n in (20, 17))
    return hidden, weight, torch.randint(13, (20,), generator=g)


@pytest.mark.parametrize("products", ["fp32", "operand"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_buffer_receives_what_the_gradient_would_be(products: str, dtype: torch.dtype, reduction: str) -> None:
    hidden, weight, target = problem(dtype)
    options = {"products": products, "reduction": reduction, "valid_vocab": 13, "chunk_size": 8}
    held = torch.randn(17, 6)
    buffer = held.clone()
    out = zloss.head_loss(hidden, weight, target, OBJECTIVE, weight_grad_buffer=buffer, **options)  # type: ignore[arg-type]
    upstream = torch.ones(()) if reduction == "mean" else torch.linspace(0.5, 2, 20)
    out.loss.backward(upstream)
    assert weight.grad is None
    # fp32 masters under autocast have the same factors and a gradient in fp32.
    masters = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        plain = zloss.head_loss(*masters, target, OBJECTIVE, **options)  # type: ignore[arg-type]
    want_hidden, want = torch.autograd.grad(plain.loss, masters, upstream)
    torch.testing.assert_close(buffer - held, want, rtol=1e-4, atol=2e-6)
    assert torch.equal(buffer[13:], held[13:])
    assert torch.equal(hidden.grad, want_hidden.to(dtype))


def test_micro_batches_add_up_in_one_buffer() -> None:
    hidden, weight, target = problem()
    module, buffer = zloss.HeadLoss(OBJECTIVE), torch.zeros(17, 6)
    for part in (slice(0, 7), slice(7, 20)):
        out = module(hidden[part], weight, target[part], normalizer=20, weight_grad_buffer=buffer)
        out.loss.backward()
    (want,) = torch.autograd.grad(module(hidden, weight, target).loss, weight)
    torch.testing.assert_close(buffer, want, rtol=1e-5, atol=1e-6)


def test_evaluation_leaves_the_buffer_alone() -> None:
    hidden, weight, target = problem()
    buffer = torch.zeros(17, 6)
    with torch.no_grad():
        zloss.head_loss(hidden, weight, target, OBJECTIVE, weight_grad_buffer=buffer)
    assert not buffer.any()


def test_what_would_be_silently_wrong_is_refused() -> None:
    hidden, weight, target = problem()

    def loss(buffer: Tensor, w: Tensor = weight, **options: object) -> Tensor:
        return zloss.head_loss(hidden, w, target, OBJECTIVE, weight_grad_buffer=buffer, **options).loss  # type: ignore[arg-type]

    with pytest.raises(errors.InputError, match="upstream gradient"):
        (2 * loss(torch.zeros(17, 6))).backward()
    twice = loss(torch.zeros(17, 6))
    twice.backward(retain_graph=True)
    with pytest.raises(errors.InputError, match="twice"):
        twice.backward()
    buffer = torch.zeros(17, 6)
    for reentrant in (False, True):
        again = checkpoint(lambda h: loss(buffer) + h.square().sum(), hidden, use_reentrant=reentrant)
        with pytest.raises(errors.InputError, match="checkpointing"):
            again.backward()
    with pytest.raises(errors.DtypeError, match="weight_grad_buffer"):
        loss(torch.zeros(17, 6, dtype=torch.bfloat16))
    with pytest.raises(errors.DtypeError, match="computed in torch"):  # it failed inside a product
        zloss.head_loss(hidden.double(), weight, target, OBJECTIVE, weight_grad_buffer=torch.zeros(17, 6))
    with pytest.raises(errors.ShapeError, match="weight_grad_buffer"):
        loss(torch.zeros(6, 17))
    with pytest.raises(errors.InputError, match="require a gradient"):
        loss(torch.zeros(17, 6), weight.detach())
    with pytest.raises(errors.InputError, match="require a gradient"):
        loss(torch.zeros(17, 6, requires_grad=True))
    with pytest.raises(errors.InputError, match="chunked"):
        loss(torch.zeros(17, 6), backend="dense")


def test_a_parameter_of_megatron_with_another_buffer_is_left_alone() -> None:
    """The protocol of `main_grad` is followed only where dW was added to it; tests/distributed/test_megatron.py runs Megatron."""
    hidden, weight, target = problem()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(17, 6), False  # type: ignore[attr-defined]
    zloss.head_loss(hidden, weight, target, OBJECTIVE, weight_grad_buffer=torch.zeros(17, 6)).loss.backward()
    assert (weight.grad, weight.grad_added_to_main_grad) == (None, False)  # type: ignore[attr-defined]
    zloss.head_loss(hidden, weight, target, OBJECTIVE, weight_grad_buffer=weight.main_grad).loss.backward()  # type: ignore[attr-defined]
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert not weight.grad.any()
