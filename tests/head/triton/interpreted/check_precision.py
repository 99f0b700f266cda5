"""What 16-bit logits get back: one ulp of the fp64 result of the same rounded numbers, at the size of a real vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import zloss
from tests.laws.definitions import relative_error

FP32 = 1e-6
LOW = (torch.bfloat16, torch.float16)


def real_size(dtype: torch.dtype, *, tokens: int = 6, vocab: int = 50257) -> tuple[Tensor, Tensor]:
    """Logits as a language model has them: a spread of 2, a common shift, and a likely target."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(tokens, vocab, generator=g) + 5
    target = torch.randint(vocab, (tokens,), generator=g)
    logits[torch.arange(tokens), target] += 8
    target[1] = -100
    return logits.to(dtype), target


def ulp(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` around the fp64 numbers, that of its subnormals included."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(truth.abs().clamp_min(info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(truth, info.eps), exponent)


def z_part(logits: Tensor, target: Tensor, objective: zloss.Objective) -> Tensor:
    """The Z source as the backend applies it, with the logits as hidden states of an identity head."""
    identity = torch.eye(logits.shape[1], dtype=logits.dtype)
    return zloss.head_source(logits, identity, target, objective, backend="triton", reduction="sum")


def losses(logits: Tensor, target: Tensor, objective: zloss.Objective) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss and gradient of the Triton backend, loss and gradient of the fp64 truth)."""
    leaf, twin = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = zloss.logits_loss(leaf, target, objective, reduction="sum", backend="triton").loss
    want = zloss.logits_loss(twin, target, objective, reduction="sum", backend="dense").loss
    got.backward()
    want.backward()
    assert leaf.grad is not None
    assert twin.grad is not None
    return got.detach(), leaf.grad, want.detach(), twin.grad


OBJECTIVES = (zloss.CrossEntropy(), zloss.StandardZLoss(0.1), zloss.CenteredZLoss(0.1), zloss.FactorizedZLoss(0.1, 0.1))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
def test_fp32_at_the_size_of_a_real_vocabulary(objective: zloss.Objective) -> None:
    loss, grad, true_loss, true_grad = losses(*real_size(torch.float32), objective)
    assert relative_error(loss, true_loss) <= FP32
    assert relative_error(grad, true_grad) <= FP32


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
def test_16_bit_gradients_are_within_one_ulp(dtype: torch.dtype, objective: zloss.Objective) -> None:
    loss, grad, true_loss, true_grad = losses(*real_size(dtype), objective)
    assert loss.dtype == torch.float32
    assert relative_error(loss, true_loss) <= FP32
    assert grad.dtype == dtype
    assert ((grad.double() - true_grad).abs() <= ulp(true_grad, dtype)).all()


@pytest.mark.parametrize("of", ["logits", "hidden states", "a gradient buffer"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_fp16_gradient_is_rounded_after_the_loss_scale(of: str, reduction: str) -> None:
    """Z alone, over so many tokens that every entry at the logits is 0 in fp16 without the scale."""
    scale, tokens = 65536.0, 2e6
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 16, generator=g).half(), torch.randn(513, 16, generator=g).half()
    target = torch.randint(513, (40,), generator=g)
    options = {"normalizer": tokens} if reduction == "mean" else {"token_weight": torch.full((40,), 1 / tokens)}

    def gradients(coef: float, low: bool) -> list[Tensor]:
        objective, backend = zloss.StandardZLoss(coef), "triton" if low else "dense"
        own = dict(options, reduction=reduction, backend=backend)
        leaves = [(x if low else x.double()).clone().requires_grad_() for x in (hidden, weight)]
        if of == "logits":
            leaves = [(hidden.float() @ weight.float().T).half().to(leaves[0].dtype).requires_grad_()]
            out = zloss.logits_loss(*leaves, target, objective, **own)
        elif of == "a gradient buffer" and low:
            buffer = torch.zeros(weight.shape)
            if (
                reduction == "mean"
            ):  # dW is in the buffer before the upstream gradient: the scale goes into the normalizer
                own["normalizer"] = tokens / scale
            out = zloss.head_loss(*leaves, target, objective, weight_grad_buffer=buffer, **own)
            (out.loss.sum() * (1 if reduction == "mean" else scale)).backward()
            return [leaves[0].grad.double(), buffer.double()]
        else:
            out = zloss.head_loss(*leaves, target, objective, **own)
        (out.loss.sum() * scale).backward()
        return [leaf.grad.double() for leaf in leaves]

    for on, off, true_on, true_off in zip(
        *(gradients(coef, low) for low in (True, False) for coef in (30.0, 0.0)), strict=True
    ):
        assert relative_error(on - off, true_on - true_off) < 2**-10


@pytest.mark.parametrize("dtype", LOW)
def test_the_ulp_is_a_bar_that_can_fail(dtype: torch.dtype) -> None:
    """Logits rounded once more on the way, as a kernel without the upcast would, are outside the bar."""
    logits, target = real_size(torch.float32)
    _, grad, _, _ = losses(logits.to(dtype), target, zloss.StandardZLoss(0.1))
    _, _, _, unrounded = losses(logits, target, zloss.StandardZLoss(0.1))
    assert not ((grad.double() - unrounded).abs() <= ulp(unrounded, dtype)).all()


@pytest.mark.parametrize("dtype", LOW)
def test_ulp_is_that_of_the_dtype(dtype: torch.dtype) -> None:
    ones = torch.tensor([1.0, 1.5, 3.0, 2.0**-30], dtype=torch.float64)
    spacing = [torch.nextafter(x.to(dtype), torch.tensor(math.inf, dtype=dtype)) - x.to(dtype) for x in ones]
    assert torch.equal(ulp(ones, dtype), torch.stack(spacing).double())


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_z_source_alone_is_fp32_whatever_the_operands_are(dtype: torch.dtype) -> None:
    logits, target = real_size(dtype, vocab=300)
    twin = logits.double().requires_grad_()
    objective = zloss.StandardZLoss(0.1)
    penalty = objective.penalty(twin, None)
    (truth,) = torch.autograd.grad(torch.where(target != -100, penalty, 0.0).sum(), twin)
    found = z_part(logits, target, objective)
    assert found.dtype == torch.float32
    assert relative_error(found, truth) <= FP32


@pytest.mark.parametrize("dtype", LOW)
def test_head_gradients_of_16_bit_operands_are_rounded_once(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 16, generator=g).to(dtype) for n in (8, 300))
    target = torch.randint(300, (8,), generator=g)
    grads = []
    for tensors, backend in (((hidden, weight), "triton"), ((hidden.double(), weight.double()), "dense")):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = zloss.head_loss(*leaves, target, zloss.GainAwareZLoss(0.1), backend=backend)
        out.loss.backward()
        grads.append((out.loss.detach(), *(leaf.grad for leaf in leaves)))
    (loss, *got), (true_loss, *want) = grads
    assert relative_error(loss, true_loss) <= FP32
    for mine, truth in zip(got, want, strict=True):
        assert mine.dtype == dtype
        # Half an ulp of storage, and the fp32 error of a sum whose terms may cancel.
        assert ((mine.double() - truth).abs() <= 0.5 * ulp(truth, dtype) + FP32 * truth.abs().max()).all()


def test_loss_scale_is_inside_before_fp16_is_rounded() -> None:
    """Gradients of a mean over tokens and a real vocabulary underflow in fp16; with a loss scale they must not."""
    logits, target = real_size(torch.float16)
    scaled, twin = logits.clone().requires_grad_(), logits.double().requires_grad_()
    (4096 * zloss.logits_loss(scaled, target, zloss.StandardZLoss(0.1), backend="triton").loss).backward()
    zloss.logits_loss(twin, target, zloss.StandardZLoss(0.1), backend="dense").loss.backward()
    assert relative_error(scaled.grad.double() / 4096, twin.grad) <= 1e-3
