"""The ops pass opcheck, and the losses join a compiled graph without a break."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor

import zloss
from zloss.head import triton as ops
from zloss.head.chunked import with_gradient
from zloss.head.logits_gradient import chunked_source, row_loss
from zloss.head.products import add_product_

TOKENS, VOCAB, WIDTH = 6, 60, 8
OBJECTIVES = (
    zloss.CrossEntropy(),
    zloss.StandardZLoss(0.7),
    zloss.CenteredZLoss(0.7),
    zloss.FactorizedZLoss(0.5, 0.9),
    zloss.GainAwareZLoss(0.7),
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Each test starts afresh: the compiler gives up on a function that it has seen with many objectives."""
    torch._dynamo.reset()


def tensors(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits, hidden, weight, target)."""
    g = torch.Generator().manual_seed(tokens)
    hidden, weight = torch.randn(tokens, WIDTH, generator=g), torch.randn(VOCAB, WIDTH, generator=g)
    target = torch.randint(VOCAB - 3, (tokens,), generator=g)
    target[2] = -100
    return hidden @ weight.T, hidden.requires_grad_(), weight.requires_grad_(), target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    logits, _, weight, target = tensors()
    logits = logits.detach().to(dtype)
    index = torch.where(target >= 0, target, -1)
    rows = [torch.rand(TOKENS) for _ in range(4)]
    shape = (VOCAB - 3, 1.3, 5.0)
    check = torch.library.opcheck
    check(ops.row_statistics, (logits, index, *shape))
    check(ops.row_source, (logits, rows[0], index, *rows[1:], *shape, True, dtype))
    chunks = (4, None)
    check(chunked_source, (logits, rows[0], index, *rows[1:], *shape, *chunks))
    for value, triton in ((rows[0], True), (rows[0], False), (torch.rand(()), False)):
        leaf = logits.clone().requires_grad_()
        check(row_loss, (leaf, value, rows[0], index, *rows[1:], *shape, *chunks, triton))
    check(row_loss, (leaf, rows[0], rows[0], index, *rows[1:3], None, *shape, *chunks, False))
    check(ops.row_projection, (logits.detach(), rows[0], weight.detach(), 1.3, None, 4, "auto", None))


def test_opcheck_of_products() -> None:
    logits, _, weight, _ = tensors()
    row = torch.rand(TOKENS)
    check = torch.library.opcheck
    narrow = weight.detach().bfloat16()
    row_max = 1.3 * logits.detach().amax(dim=1)  # E is stored in fp16, which holds no exp(z − m) far above 1
    check(ops.row_projection, (logits.detach(), row_max, narrow, 1.3, None, 4, "operand", None))
    check(ops.exp_rows_, (logits.detach().clone(), row, 5.0))
    out = torch.empty(TOKENS, VOCAB, dtype=torch.bfloat16)
    check(ops.narrow_exp_, (logits.detach().clone(), out, row, 1.0, 1.0, 5.0))
    check(add_product_, (torch.rand(3, 5), torch.rand(3, 4).bfloat16(), torch.rand(4, 5).bfloat16(), 1.0, 0.5))
    check(with_gradient, (torch.rand(()), weight, torch.rand_like(weight)))
    check(with_gradient, (torch.rand((), requires_grad=True), weight.bfloat16(), torch.rand_like(weight)))


def compare(step: Callable[..., Tensor], *leaves: Tensor, backend: str = "aot_eager", rtol: float = 1e-5) -> None:
    """Value and gradients with and without the compiler, in one graph; bf16 gradients may differ by an ulp."""
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    eager, found = step(*leaves), compiled(*leaves)
    assert torch.allclose(found, eager, rtol=1e-6)
    upstream = torch.rand_like(eager)
    got = torch.autograd.grad(found, leaves, upstream)
    want = torch.autograd.grad(eager, leaves, upstream)
    for mine, truth in zip(got, want, strict=True):
        assert torch.allclose(mine, truth, rtol=rtol, atol=1e-6)
        assert truth.any()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
def test_logits_loss_in_one_graph(objective: zloss.Objective) -> None:
    """Scalar reductions for some, per-token losses for others: both are made of the same ops."""
    reduction = "none" if objective.needs_mu else "mean"
    logits, _, weight, target = tensors()
    head = weight.detach()

    def step(x: Tensor) -> Tensor:
        out = zloss.logits_loss(
            torch.tanh(x) * 3, target, objective, weight=head, reduction=reduction, backend="triton", valid_vocab=57
        )
        return out.loss * 2

    compare(step, logits.detach().requires_grad_())


def test_logits_loss_through_the_default_compiler() -> None:
    logits, _, _, target = tensors()

    def step(x: Tensor) -> Tensor:
        return zloss.logits_loss(
            torch.tanh(x) * 3, target, zloss.StandardZLoss(0.7), backend="triton", softcap=5.0
        ).loss

    compare(step, logits.detach().requires_grad_(), backend="inductor")


@pytest.mark.parametrize("objective", OBJECTIVES[2:], ids=lambda objective: objective.name)
def test_head_loss_in_one_graph(objective: zloss.Objective) -> None:
    _, hidden, weight, target = tensors()
    bias = torch.randn(VOCAB).requires_grad_()
    module = zloss.HeadLoss(objective, backend="triton", chunk_size=4, valid_vocab=57, label_smoothing=0.1)

    def step(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return module(torch.tanh(h) * 3, w, target, bias=b).loss * 2

    compare(step, hidden, weight, bias)


def test_head_loss_with_16_bit_products_in_one_graph() -> None:
    _, hidden, weight, target = tensors()
    leaves = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    module = zloss.HeadLoss(zloss.CenteredZLoss(0.7), backend="triton", chunk_size=4, products="operand")

    def step(h: Tensor, w: Tensor) -> Tensor:
        return module(h, w, target).loss * 2

    compare(step, *leaves, rtol=0.02)


def test_a_new_batch_size_is_no_new_graph_break() -> None:
    step = torch.compile(
        lambda x, y: zloss.logits_loss(x, y, zloss.CenteredZLoss(0.7), backend="triton").loss,
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for tokens in (5, 7, 11):
        logits, _, _, target = tensors(tokens)
        want = zloss.logits_loss(logits, target, zloss.CenteredZLoss(0.7), backend="dense").loss
        assert torch.allclose(step(logits.detach(), target), want, rtol=1e-6)


def test_per_token_head_loss_breaks_the_graph_and_is_right() -> None:
    _, hidden, weight, target = tensors()

    def step(h: Tensor) -> Tensor:
        out = zloss.head_loss(
            torch.tanh(h), weight, target, zloss.StandardZLoss(0.7), reduction="none", backend="triton"
        )
        return out.loss * 2

    got = torch.autograd.grad(torch.compile(step, backend="aot_eager")(hidden).sum(), hidden)
    assert torch.allclose(got[0], torch.autograd.grad(step(hidden).sum(), hidden)[0], rtol=1e-6)
