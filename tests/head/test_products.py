"""16-bit products: the errors they may have against fp64 of the same inputs, and that Z of confident tokens survives.

On the CPU the products of "operand" are emulated: E and x∘h are rounded as on a GPU, then multiplied in fp32.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

import zloss
from tests.laws.definitions import make_case, measured, reference, relative_error
from zloss.head import products

TOKENS, WIDTH, VOCAB = 256, 96, 4000
BF16 = torch.bfloat16


def tensors(scale: float, dtype: torch.dtype = BF16, *, peak: float = 0.0, vocab: int = VOCAB) -> tuple[Tensor, ...]:
    """(hidden, weight, target) with logits of that standard deviation; `peak` lifts the target of a quarter of the tokens."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g)
    weight = scale * torch.randn(vocab, WIDTH, generator=g) / WIDTH**0.5
    target = torch.randint(vocab, (TOKENS,), generator=g)
    if peak:
        rows = weight[target[: TOKENS // 4]]
        hidden[: TOKENS // 4] += peak * rows / rows.square().sum(1, keepdim=True)
    return hidden.to(dtype), weight.to(dtype), target


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, target: Tensor, objective: zloss.Objective, **options: object
) -> tuple[zloss.HeadLossOutput, Tensor, Tensor]:
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = zloss.head_loss(*leaves, target, objective, **options)  # type: ignore[arg-type]
    return out, *torch.autograd.grad(out.loss, leaves)


def unrounded(
    hidden: Tensor, weight: Tensor, target: Tensor, objective: zloss.Objective, products: str
) -> tuple[zloss.HeadLossOutput, Tensor, Tensor]:
    """The same products of the same 16-bit factors, from fp32 masters under autocast: gradients come in fp32."""
    with torch.autocast("cpu", hidden.dtype):
        return loss_and_gradients(hidden.float(), weight.float(), target, objective, products=products)


def truth(
    hidden: Tensor, weight: Tensor, target: Tensor, objective: zloss.Objective
) -> tuple[zloss.HeadLossOutput, Tensor, Tensor]:
    return loss_and_gradients(hidden.double(), weight.double(), target, objective, backend="dense")


OBJECTIVES = (zloss.StandardZLoss(1e-4), zloss.CenteredZLoss(0.1), zloss.GainAwareZLoss(0.1))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.name)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_operand_has_the_error_of_one_rounding_whatever_the_size_of_the_logits(
    objective: zloss.Objective, dtype: torch.dtype
) -> None:
    sources = []
    for scale in (1.0, 2.0, 4.0):
        problem = tensors(scale, dtype)
        want, *want_gradients = truth(*problem, objective)
        got, *gradients = loss_and_gradients(*problem, objective, products="operand")
        assert relative_error(gradients[0], want_gradients[0]) <= 2.5e-3
        assert relative_error(gradients[1], want_gradients[1]) <= 4e-3
        source = zloss.head_source(*problem, objective, products="operand").double()
        exact = zloss.head_source(problem[0].double(), problem[1].double(), problem[2], objective, backend="dense")
        sources.append(relative_error(source, exact))
        for name in ("log_z", "mu", "p_norm"):
            assert relative_error(getattr(got.stats, name), getattr(want.stats, name)) <= 2e-6, name
        for name in ("gain", "gain_centered"):
            assert relative_error(getattr(got.stats, name), getattr(want.stats, name)) <= 2e-3, name
        assert relative_error(got.loss, want.loss) <= 2e-6
        p = torch.softmax(problem[0].double() @ problem[1].double().T, dim=1)
        onto_p, exact_onto_p = (p * source).sum(1), (p * exact).sum(1)
        assert relative_error(onto_p, exact_onto_p) <= 1e-3
    assert max(sources) <= 2.5e-3
    assert sources[2] <= 1.2 * sources[0], "the error grows with the logits"


def z_alone(problem: tuple[Tensor, ...], products: str | None) -> list[Tensor]:
    """dh and dW of Z as the difference with and without λ = 1e-4; products=None: the truth."""
    run = truth if products is None else functools.partial(unrounded, products=products)
    found = [run(*problem, objective)[1:] for objective in (zloss.StandardZLoss(1e-4), zloss.CrossEntropy())]
    return [on.double() - off.double() for on, off in zip(*found, strict=True)]


def confident(peak: float = 21.0, vocab: int = 16000, scale: float = 1.0) -> tuple[Tensor, ...]:
    problem = tensors(scale, peak=peak, vocab=vocab)
    p = torch.softmax(problem[0].double() @ problem[1].double().T, dim=1)
    likely = p.gather(1, problem[2].unsqueeze(1)).squeeze(1)
    assert int((likely > 0.998).sum()) == TOKENS // 4
    return problem


@pytest.mark.parametrize(
    ("scale", "peak", "vocab"),
    [(1.0, 21.0, 4000), (1.0, 21.0, 16000), (1.0, 30.0, 16000), (2.0, 30.0, 4000), (4.0, 40.0, 4000)],
)
def test_z_of_confident_tokens_survives(scale: float, peak: float, vocab: int) -> None:
    problem = confident(peak, vocab, scale)
    for mine, exact in zip(z_alone(problem, "operand"), z_alone(problem, None), strict=True):
        assert relative_error(mine, exact) <= 1e-2
    for mine, exact in zip(z_alone(problem, "fp32"), z_alone(problem, None), strict=True):
        assert relative_error(mine, exact) <= 1e-3
    got, want = (run(*problem, zloss.StandardZLoss(1e-4))[1] for run in (_operand, truth))
    per_token = (got.double() - want).norm(dim=1) / want.norm(dim=1)
    assert per_token[: TOKENS // 4].max() <= 5e-3


def _operand(*args: object) -> tuple[zloss.HeadLossOutput, Tensor, Tensor]:
    return loss_and_gradients(*args, products="operand")  # type: ignore[arg-type]


def test_the_check_fails_when_the_residue_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the residue of x∘h the difference that λ makes to a confident token is rounded away."""
    monkeypatch.setattr(products, "_entries", lambda e, index, scale: torch.zeros(len(index), 1))
    problem = confident()
    dh, dw = (
        relative_error(mine, exact)
        for mine, exact in zip(z_alone(problem, "operand"), z_alone(problem, None), strict=True)
    )
    assert dw > 0.1
    assert dh <= 1e-2


def test_the_residue_is_added_where_the_largest_logit_is_not_the_target() -> None:
    """A quarter of the tokens is sure of a wrong entry: the row of the maximum is another one than the target's."""
    hidden, weight, target = confident()
    wrong = hidden, weight, (target + 1) % len(weight)
    for mine, exact in zip(z_alone(wrong, "operand"), z_alone(wrong, None), strict=True):
        assert relative_error(mine, exact) <= 1e-2


def test_fp16_keeps_the_digits_of_small_probabilities() -> None:
    """p down to 1e-7 is applied to 2^-11; without the scale of E it would be a subnormal number of few digits."""
    hidden, weight = torch.eye(8, dtype=torch.float16), torch.zeros(8, 8, dtype=torch.float16)
    weight[0] = 16.0
    problem = hidden, weight, torch.zeros(8, dtype=torch.int64)
    objective = zloss.StandardZLoss(0.1)
    source = zloss.head_source(*problem, objective, products="operand").double()
    exact = zloss.head_source(hidden.double(), weight.double(), problem[2], objective, backend="dense")
    p = torch.softmax(hidden.double() @ weight.double().T, dim=1)
    assert p.min() < 1.2e-7
    assert ((source - exact).abs() <= 2**-11 * exact.abs()).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
def test_fp16_gradients_neither_underflow_nor_overflow(reduction: str, loss_scale: float) -> None:
    hidden, weight, target = tensors(1.0, torch.float16)
    grads = []
    for dtype, options in ((torch.float32, {"products": "operand"}), (torch.float64, {"backend": "dense"})):
        leaves = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
            out = zloss.head_loss(*leaves, target, zloss.StandardZLoss(1e-3), reduction=reduction, **options)  # type: ignore[arg-type]
        grads.append(torch.autograd.grad((out.loss * loss_scale).sum(), leaves))
    for mine, exact in zip(*grads, strict=True):
        assert relative_error(mine, exact) <= 1e-4


@pytest.mark.parametrize("name", ["standard", "gain-aware", "centered"])
def test_every_option_with_16_bit_products(name: str) -> None:
    """Bias, ignored tokens, padding, scale, softcap, smoothing, per-token losses: as right as the products are."""
    objective = {o.name: o for o in OBJECTIVES}[name]
    variants = [{"with_bias": True, "with_ignored": True, "valid_vocab": 41, "logit_scale": -1.75}]
    variants += [{"reduction": "none", "with_bias": True, "with_weights": True, "with_ignored": True}]
    if objective.needs_mu:
        variants += [{"label_smoothing": 0.1}]
    else:
        variants += [{"softcap": 3.0, "logit_scale": 2.0, "with_bias": True, "with_ignored": True}]
    for options in variants:
        case = make_case(objective, **options)  # type: ignore[arg-type]
        exact = {
            field: value.to(BF16).double()
            for field in ("hidden", "weight", "bias")
            if (value := getattr(case, field)) is not None
        }
        case = dataclasses.replace(case, **exact)
        with torch.autocast("cpu", BF16):
            got = measured(case, "chunked", 8, torch.float32, products="operand")
        want = reference(case)
        for key in got.keys() & want.keys():
            assert relative_error(got[key], want[key]) <= 5e-3, key


def test_logits_loss_takes_the_gain_from_16_bit_products() -> None:
    hidden, weight, target = tensors(2.0)
    logits = hidden.float() @ weight.float().T
    plain, narrow = (
        zloss.logits_loss(logits, target, zloss.StandardZLoss(0.1), weight=weight, products=products).stats
        for products in ("fp32", "operand")
    )
    assert 1e-6 < relative_error(narrow.gain, plain.gain) <= 2e-3
    assert torch.equal(narrow.log_z, plain.log_z)


def test_auto_on_the_cpu_is_fp32_bit_for_bit() -> None:
    problem = tensors(1.0)
    for mine, other in zip(
        loss_and_gradients(*problem, OBJECTIVES[1])[1:],
        loss_and_gradients(*problem, OBJECTIVES[1], products="fp32")[1:],
        strict=True,
    ):
        assert torch.equal(mine, other)


def test_heads_of_any_size_and_spread_keep_their_digits() -> None:
    """E W takes an fp16 copy of a bf16 head, scaled by its largest entry: tiny, huge and uneven heads are as exact as others."""
    hidden, weight, target = tensors(1.0)
    spread = weight.double() * torch.logspace(-6, 0, len(weight), dtype=torch.float64).unsqueeze(1)
    for head, factor in ((weight * 2.0**-30, 2.0**30), (weight * 2.0**20, 2.0**-20), (spread.to(BF16), 1.0)):
        problem = (hidden * factor).to(BF16), head, target
        got, want = unrounded(*problem, OBJECTIVES[0], "operand"), truth(*problem, OBJECTIVES[0])
        for mine, exact in zip(got[1:], want[1:], strict=True):
            assert relative_error(mine, exact) <= 1e-4


def test_a_head_of_zeros_has_gradients() -> None:
    hidden, weight, target = tensors(1.0)
    _, dh, dw = unrounded(hidden, torch.zeros_like(weight), target, OBJECTIVES[0], "operand")
    want = truth(hidden, torch.zeros_like(weight), target, OBJECTIVES[0])
    assert not dh.any()
    assert relative_error(dw, want[2]) <= 1e-3


def test_a_strong_penalty_is_not_too_large_for_fp16() -> None:
    hidden, weight, target = tensors(1.0)
    for coef in (1.0, 100.0):
        objective = zloss.StandardZLoss(coef, target=0.0)
        got, want = unrounded(hidden, weight, target, objective, "operand"), truth(hidden, weight, target, objective)
        for mine, exact in zip(got[1:], want[1:], strict=True):
            assert relative_error(mine, exact) <= 2**-12
