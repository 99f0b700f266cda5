"""Gradients in 16 bits are rounded once, after the upstream gradient: a loss scale comes in time, and 1/3 costs no digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import zloss

LOSS_SCALE = 65536.0
TOKENS, VOCAB, WIDTH = 48, 513, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every option": {"label_smoothing": 0.1, "softcap": 4.0, "logit_scale": 1.5, "valid_vocab": 500, "chunk_size": 20},
}
CASES = [("plain", "eager"), ("every option", "eager"), ("plain", "compiled")]
Step = Callable[[], Tensor]


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, hidden states, head and targets in fp64, of numbers that `dtype` holds."""
    g = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, WIDTH, generator=g).to(dtype).double() for n in (TOKENS, VOCAB))
    logits = (2 * torch.randn(TOKENS, VOCAB, generator=g)).to(dtype).double()
    target = torch.randint(500, (TOKENS,), generator=g)
    target[::7] = -100
    return logits, hidden, weight, target


def differentiated(loss: Callable[..., Tensor], factor: float, *operands: Tensor, way: str = "eager") -> list[Tensor]:
    """Gradients of factor·Σ loss at copies of the operands."""
    leaves = [operand.clone().requires_grad_() for operand in operands]
    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if way == "compiled" else loss
    (factor * run(*leaves)).sum().backward()
    return [leaf.grad for leaf in leaves]


def share_rounded_once(got: Tensor, want: Tensor) -> float:
    """Share of entries that are those of fp64, rounded to the dtype of `got`; a second rounding changes a fifth of them."""
    return float((got == want.to(got.dtype)).double().mean())


@pytest.mark.parametrize(
    ("name", "way", "backend"), [*((*case, "auto") for case in CASES), ("every option", "eager", "dense")]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_fp16_gradient_was_rounded_before_the_loss_scale(reduction: str, name: str, way: str, backend: str) -> None:
    """Without the scale every entry is below the smallest number of fp16: it was 0, and now is that of fp64."""
    logits, _, _, target = problem(torch.float16)
    tokens = 2e6
    options = {"reduction": reduction, "backend": backend, **OPTIONS[name]}
    options |= {"normalizer": tokens} if reduction == "mean" else {"token_weight": torch.full((TOKENS,), 1 / tokens)}

    def gradient(coef: float, z: Tensor, **other: Any) -> Tensor:
        objective = zloss.StandardZLoss(coef)

        def loss(leaf: Tensor) -> Tensor:
            return zloss.logits_loss(leaf, target, objective, **(options | other)).loss

        return differentiated(loss, LOSS_SCALE, z, way="eager" if other else way)[0].double()

    z_alone, want = (
        gradient(30.0, z, **other) - gradient(0.0, z, **other)
        for z, other in ((logits.half(), {}), (logits, {"backend": "dense"}))
    )
    assert (want / LOSS_SCALE).abs().max() < 1e-4
    assert float((z_alone - want).norm() / want.norm()) < 2**-11


def test_an_fp16_gradient_of_many_tokens_was_mostly_zeros() -> None:
    """No normalizer, no tiny weights: the mean over 1,024 tokens of 8,192 classes is enough."""
    g = torch.Generator().manual_seed(0)
    logits, target = torch.randn(1024, 8192, generator=g).half(), torch.randint(8192, (1024,), generator=g)

    def loss(z: Tensor) -> Tensor:
        return zloss.logits_loss(z, target, zloss.StandardZLoss(1.0)).loss

    (got,), (want,) = (differentiated(loss, LOSS_SCALE, z) for z in (logits, logits.double()))
    assert share_rounded_once(got, want) > 0.99


@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_at_logits_was_rounded_twice(dtype: torch.dtype, reduction: str, name: str, way: str) -> None:
    logits, _, _, target = problem(dtype)

    objective = zloss.StandardZLoss(0.7)

    def loss(z: Tensor) -> Tensor:
        return zloss.logits_loss(z, target, objective, reduction=reduction, **OPTIONS[name]).loss

    (got,), (want,) = (differentiated(loss, 1 / 3, z, way=w) for z, w in ((logits.to(dtype), way), (logits, "eager")))
    assert got.dtype == dtype
    assert share_rounded_once(got, want) > 0.99


@pytest.mark.parametrize(("name", "way"), CASES)
def test_gradients_of_a_head_were_rounded_twice(name: str, way: str) -> None:
    dtype = torch.bfloat16
    _, hidden, weight, target = problem(dtype)
    bias = weight[:, 0].clone()

    def loss(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        objective = zloss.StandardZLoss(0.7)
        return zloss.head_loss(h, w, target, objective, bias=b, **OPTIONS[name]).loss

    got = differentiated(loss, 1 / 3, *(x.to(dtype) for x in (hidden, weight, bias)), way=way)
    for of, rounded, truth in zip(("h", "W", "b"), got, differentiated(loss, 1 / 3, hidden, weight, bias), strict=True):
        assert rounded.dtype == dtype
        assert share_rounded_once(rounded, truth) > 0.99, of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_second_backward_pass_has_the_gradient_of_the_first(dtype: torch.dtype) -> None:
    logits, _, _, target = problem(dtype)
    for reduction, factors in (("mean", (1.0, 1 / 3, 1.0)), ("sum", (LOSS_SCALE, 1.0)), ("none", (1.0, 1.0))):
        leaf = logits.to(dtype).requires_grad_()
        loss = zloss.logits_loss(leaf, target, zloss.StandardZLoss(0.7), reduction=reduction).loss.sum()
        for factor in factors:
            (got,) = torch.autograd.grad(loss, leaf, torch.tensor(factor), retain_graph=True)
            fresh = zloss.logits_loss(leaf, target, zloss.StandardZLoss(0.7), reduction=reduction).loss.sum()
            assert torch.equal(got, torch.autograd.grad(fresh, leaf, torch.tensor(factor))[0])


@pytest.mark.parametrize("of", ["logits", "hidden states"])
def test_a_global_normalizer_broke_the_compiled_graph(of: str) -> None:
    _, hidden, weight, target = problem(torch.float32)
    count = zloss.global_normalizer(target)

    def loss(h: Tensor, w: Tensor, n: Tensor) -> Tensor:
        objective = zloss.StandardZLoss(0.7)
        if of == "logits":
            return zloss.logits_loss(h @ w.T, target, objective, normalizer=n).loss
        return zloss.head_loss(h, w, target, objective, normalizer=n).loss

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for normalizer in (count, torch.full_like(count, 7.0), torch.zeros_like(count)):
        found = [
            differentiated(lambda h, w, run=run, n=normalizer: run(h, w, n), 1.0, hidden, weight)
            for run in (compiled, loss)
        ]
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
