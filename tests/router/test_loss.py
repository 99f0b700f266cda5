"""Router loss: values and gradients against fp64 autograd and against each convention's literal loop."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zloss
from tests.router.literal import LITERAL, Case
from zloss.errors import CoefficientError, DtypeError, InputError, ShapeError, UnknownNameError
from zloss.router.conventions import RouterContext, match_coefficient, router_conventions, router_scale
from zloss.router.loss import RouterLoss, router_loss

L, T, E, D = 4, 23, 8, 12
CONTEXT = RouterContext(model_layers=6, encoder_layers=1, valid_tokens=17, micro_batches=3)


def logits(seed: int = 0, *, shape: tuple[int, ...] = (L, T, E), dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


literal_case = partial(Case, model_layers=6, encoder_layers=1, labelled=17, micro_batches=3)
"""The same context, as a literal reduction takes it."""


def found(r: Any, **options: Any) -> tuple[RouterLoss, Tensor]:
    """The router loss and its gradient at `r`: by default a token-layer mean with λ = 1e-3 and k = 2."""
    out = router_loss(r, **{"coef": 1e-3, "convention": "token_layer_mean", "top_k": 2} | options)
    return out, torch.autograd.grad(out.loss, r, retain_graph=True)[0]


def straight(r: Tensor, coef: float, target: float, alpha: Tensor | float) -> Tensor:
    return coef * (alpha * (torch.logsumexp(r, dim=-1) - target) ** 2).sum()


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def test_every_convention_has_a_literal_definition() -> None:
    assert set(LITERAL) == {convention.name for convention in router_conventions()}


@pytest.mark.parametrize("name", list(LITERAL))
@pytest.mark.parametrize("top_k", [1, 3])
def test_gradient_equals_the_literal_reduction(name: str, top_k: int) -> None:
    r = logits()
    literal = LITERAL[name](literal_case(list(r.unbind(0)), 1e-2, top_k, 0.5))
    (want,) = torch.autograd.grad(literal, r)
    out, got = found(r, coef=1e-2, convention=name, top_k=top_k, target=0.5, context=CONTEXT)
    if name == "hf_nllb_moe":
        assert torch.equal(got, want)
        assert out.relative == 0.0
        return
    assert relative_error(got, want) <= 1e-12
    if not name.startswith("megatron"):  # a side channel's scalar is 0 by design; its gradient is what counts
        assert float(out.loss.detach()) == pytest.approx(float(literal.detach()), rel=1e-12)


def test_a_wrong_denominator_fails_the_literal_comparison() -> None:
    r = logits()
    (want,) = torch.autograd.grad(LITERAL["active_route_mean"](literal_case(list(r.unbind(0)), 1e-2, 2, 0.5)), r)
    _, got = found(r, coef=1e-2, target=0.5)
    assert relative_error(got, want) > 0.5


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)]
)
@pytest.mark.parametrize("target", [None, 0.0, 3.0])
def test_value_and_gradient_against_fp64_autograd(dtype: torch.dtype, tolerance: float, target: float | None) -> None:
    """The statistics of bf16 logits are in fp32."""
    r = logits(1, dtype=dtype)
    exact = r.detach().double().requires_grad_()
    want = straight(exact, 1e-3, math.log(E) if target is None else target, 1 / (L * T))
    (want_grad,) = torch.autograd.grad(want, exact)
    out, grad = found(r, target=target)
    assert grad.dtype == dtype
    assert out.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(out.loss.detach()) == pytest.approx(float(want.detach()), rel=tolerance)
    if dtype == torch.bfloat16:  # rounded once, on its way into bf16
        assert torch.allclose(grad, want_grad.to(dtype), rtol=2**-7, atol=0)
    else:
        assert relative_error(grad, want_grad) <= tolerance


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 7, 8])
def test_relative_scales_are_exactly_one_inverse_k_and_k(top_k: int) -> None:
    r = logits()
    for name, want in (("token_layer_mean", 1.0), ("active_route_mean", 1 / top_k), ("active_route_sum", float(top_k))):
        out = router_loss(r, coef=1e-3, convention=name, top_k=top_k)
        assert out.relative == want
        assert out.alpha == pytest.approx(want / (L * T), rel=1e-15)
        assert out.absolute == pytest.approx(1e-3 * want / (L * T), rel=1e-15)
        static = router_scale(name, layers=L, tokens=T, top_k=top_k, coef=1e-3)
        assert (static.relative, static.alpha) == (want, pytest.approx(out.alpha, rel=1e-15))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in LITERAL if name != "hf_nllb_moe"])
@given(top_k=st.integers(1, E), coef=st.floats(1e-6, 1.0))
def test_matched_coefficient_equals_the_token_layer_mean_up_to_rounding(
    name: str, dtype: torch.dtype, top_k: int, coef: float
) -> None:
    r = logits(dtype=dtype)
    # stacks of unequal depth have no single matching coefficient
    counts = {"model_layers": 6, "encoder_layers": L // 2, "valid_tokens": 17, "micro_batches": 3}
    matched = match_coefficient(coef, "token_layer_mean", name, layers=L, top_k=top_k, tokens=T, **counts)
    want, want_grad = found(r, coef=coef, top_k=top_k)
    got, got_grad = found(r, coef=matched, convention=name, top_k=top_k, context=RouterContext(**counts))
    one_ulp = torch.finfo(dtype).eps
    # λ·3 and λ/3 are not doubles: in fp64 λα itself may be one ulp off, and its products round again.
    rounding = 1 if dtype == torch.float32 else 3
    assert got.absolute == pytest.approx(want.absolute, rel=2 * torch.finfo(torch.float64).eps)
    assert torch.allclose(got.loss, want.loss, rtol=rounding * one_ulp, atol=0)
    assert torch.allclose(got_grad, want_grad, rtol=rounding * one_ulp, atol=0)


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["active_route_mean", "active_route_sum"])
def test_matched_paper_variants_are_bit_equal(name: str, top_k: int) -> None:
    for dtype in (torch.float32, torch.float64):
        r = logits(3, dtype=dtype)
        matched = match_coefficient(1e-3, "token_layer_mean", name, layers=L, top_k=top_k)
        want, want_grad = found(r, top_k=top_k)
        got, got_grad = found(r, coef=matched, convention=name, top_k=top_k)
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got_grad, want_grad)


def test_masked_tokens_leave_numerator_and_denominator() -> None:
    r = logits(4)
    mask = torch.rand(L, T, generator=torch.Generator().manual_seed(0)) < 0.6
    kept = [layer[keep].detach().requires_grad_() for layer, keep in zip(r.unbind(0), mask, strict=True)]
    total = sum(len(layer) for layer in kept)
    want = sum(((torch.logsumexp(layer, dim=1) - math.log(E)) ** 2).sum() for layer in kept) * 1e-3 / total
    want_grads = torch.autograd.grad(want, kept)
    with torch.no_grad():
        r[~mask] = float("nan")  # padding may hold anything
    out, got = found(r, mask=mask)
    assert float(out.loss.detach()) == pytest.approx(float(want.detach()), rel=1e-12)
    assert torch.equal(got[~mask], torch.zeros_like(got[~mask]))
    assert relative_error(got[mask], torch.cat(want_grads)) <= 1e-12
    assert (out.decisions, out.nonfinite, out.relative) == (total, 0, 1.0)
    assert int(out.load.sum()) == 2 * total


def test_uneven_masks_give_every_layer_its_own_alpha_under_a_layer_sum() -> None:
    r = logits(5)
    mask = torch.ones(L, T, dtype=torch.bool)
    mask[0, 5:] = False
    mask[1] = False
    out = router_loss(r, coef=1.0, convention="megatron", top_k=1, mask=mask, target=0.0)
    kept = [layer[keep] for layer, keep in zip(r.unbind(0), mask, strict=True) if keep.any()]
    want = sum((torch.logsumexp(layer, dim=1) ** 2).mean() for layer in kept)
    assert float(out.loss.detach()) == pytest.approx(float(want.detach()), rel=1e-12)
    assert out.alpha_per_layer.tolist() == pytest.approx([1 / 5, 0.0, 1 / T, 1 / T])
    assert out.relative == pytest.approx(float(len(kept)))


def test_a_mask_of_one_row_serves_all_layers() -> None:
    r = logits(6)
    mask = torch.arange(T) % 3 != 0
    one, each = (found(r, convention="olmoe", mask=m)[0] for m in (mask, mask.expand(L, T)))
    assert torch.equal(one.loss, each.loss)


def test_all_tokens_masked_is_zero_with_zero_gradient() -> None:
    r = logits(7)
    for name in LITERAL:
        out, grad = found(r, convention=name, mask=torch.zeros(T, dtype=torch.bool), context=CONTEXT)
        assert float(out.loss.detach()) == 0.0
        assert torch.equal(grad, torch.zeros_like(grad))
        assert (out.decisions, out.alpha if name != "olmo_core" else 0.0) == (0, 0.0)


def test_layers_without_tokens_are_zero() -> None:
    r = torch.zeros(2, 0, E, requires_grad=True)
    out = router_loss(r, coef=1e-3, convention="megatron", top_k=2)
    out.loss.backward()
    assert (float(out.loss.detach()), out.decisions, out.relative) == (0.0, 0, 0.0)


def test_autocast_rounds_nothing() -> None:
    r, weight = logits(dtype=torch.float32), torch.randn(L, E, D)
    want, want_grad = found(r, convention="olmoe", weight=weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, got_grad = found(r, convention="olmoe", weight=weight)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.correction_norm_per_layer, want.correction_norm_per_layer)
    assert torch.equal(got_grad, want_grad)


@pytest.mark.parametrize("coef", [None, 0.0])
def test_off_is_exactly_zero_even_for_a_nan_router(coef: float | None) -> None:
    r = logits(8)
    with torch.no_grad():
        r[0, 0, 0] = float("nan")
    out, grad = found(r, coef=coef)
    assert float(out.loss.detach()) == 0.0
    assert torch.equal(grad, torch.zeros_like(grad))
    assert (out.nonfinite, out.absolute) == (1, 0.0)


def test_nan_logits_propagate_and_are_counted() -> None:
    r = logits(9)
    with torch.no_grad():
        r[1, 2, 3] = float("nan")
        r[2, 4, 0] = float("inf")
    out, grad = found(r)
    assert math.isnan(float(out.loss.detach()))
    assert out.nonfinite == 2
    assert bool(grad[1, 2].isnan().all())
    assert bool(grad[0].isfinite().all())


def test_an_expert_at_minus_infinity_takes_no_probability_and_no_entropy() -> None:
    r = torch.zeros(1, 3, 4, dtype=torch.float64)
    r[..., 3] = float("-inf")
    out = router_loss(r, coef=1.0, convention="token_layer_mean", top_k=3, target=0.0)
    assert float(out.loss) == pytest.approx(math.log(3) ** 2)
    assert float(out.entropy) == pytest.approx(math.log(3))
    assert out.nonfinite == 0


def test_statistics_against_their_definitions() -> None:
    r, weight = logits(10), torch.randn(L, E, D, dtype=torch.float64)
    out, grad = found(r, coef=1e-2, convention="active_route_sum", weight=weight, capacity=6)
    p = r.detach().softmax(dim=-1)
    assert float(out.entropy) == pytest.approx(float(-(p * p.log()).sum(dim=-1).mean()), rel=1e-12)
    load = torch.nn.functional.one_hot(r.topk(2, dim=-1).indices, E).sum(dim=(1, 2)).double()
    assert torch.equal(out.load, load)
    cv = (load.var(dim=1, correction=0).sqrt() / load.mean(dim=1)).mean()
    assert float(out.load_cv) == pytest.approx(float(cv), rel=1e-12)
    assert out.dropped is not None
    assert float(out.dropped) == pytest.approx(float((load - 6).clamp_min(0).sum() / load.sum()), rel=1e-12)
    # ‖δ_h‖ is the norm of the gradient that reaches the router's input
    norms = torch.einsum("lte,led->ltd", grad, weight).norm(dim=-1)
    assert out.correction_norm is not None
    assert float(out.correction_norm) == pytest.approx(float(norms.mean()), rel=1e-12)
    assert torch.allclose(out.correction_norm_per_layer, norms.mean(dim=1), rtol=1e-12)
    assert float(out.per_layer.sum()) == pytest.approx(float(out.loss.detach()), rel=1e-12)


def test_top_k_of_all_experts_loads_them_evenly() -> None:
    out = router_loss(logits(), coef=1e-3, convention="token_layer_mean", top_k=E)
    assert torch.equal(out.load, torch.full((L, E), float(T), dtype=torch.float64))
    assert float(out.load_cv) == 0.0


def test_forms_of_the_same_layers_agree() -> None:
    r = logits(11)
    stacked, listed, single = (
        router_loss(form, coef=1e-3, convention="megatron", top_k=2) for form in (r, list(r.unbind(0)), r[0])
    )
    assert torch.equal(stacked.loss, listed.loss)
    assert torch.equal(*(torch.autograd.grad(out.loss, r)[0] for out in (stacked, listed)))
    assert torch.equal(single.loss, stacked.per_layer[0])


def test_a_normalizer_makes_micro_batches_add_up_to_the_whole_batch() -> None:
    r = logits(12)
    for name in ("token_layer_mean", "active_route_mean", "megatron", "olmoe"):
        whole, grad = found(r, convention=name)
        parts = [
            router_loss(part, coef=1e-3, convention=name, top_k=2, normalizer=T)
            for part in (r[:, :7].contiguous(), r[:, 7:].contiguous())
        ]
        total = parts[0].loss + parts[1].loss
        assert float(total.detach()) == pytest.approx(float(whole.loss.detach()), rel=1e-12)
        assert relative_error(torch.autograd.grad(total, r)[0], grad) <= 1e-12
        assert parts[0].relative == whole.relative


def test_encoder_and_decoder_may_differ_in_length() -> None:
    encoder = [logits(13, shape=(9, E)), logits(14, shape=(9, E))]
    decoder = [logits(15, shape=(4, E))]
    layers = [*encoder, *decoder]
    out = router_loss(
        layers, coef=1.0, convention="hf_switch", top_k=1, target=0.0, context=RouterContext(encoder_layers=2)
    )
    want = sum((torch.logsumexp(torch.cat(stack), dim=1) ** 2).mean() for stack in (encoder, decoder))
    got_grads, want_grads = (torch.autograd.grad(loss, layers) for loss in (out.loss, want))
    assert relative_error(torch.cat(got_grads), torch.cat(want_grads)) <= 1e-12
    assert out.relative == pytest.approx(2.0)  # the mean over decisions is the number of stacks
    assert out.relative_per_layer.tolist() == pytest.approx([22 / 18, 22 / 18, 22 / 4])


def test_upstream_gradient_scales_the_source_and_statistics_carry_no_graph() -> None:
    r = logits(16)
    out, once = found(r)
    (thrice,) = torch.autograd.grad(3 * out.loss, r)
    assert torch.allclose(thrice, 3 * once, rtol=1e-15)
    for tensor in (out.per_layer, out.entropy, out.load, out.load_cv, out.stats.log_z):
        assert not tensor.requires_grad


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top_k": E + 1}, InputError, "at most the number of experts, E = 8"),
        ({"top_k": 0}, InputError, "`top_k` is expected to be an integer ≥ 1, but got 0"),
        ({"top_k": 2.0}, InputError, "`top_k`"),
        ({"coef": -1.0}, CoefficientError, "≥ 0, but got -1.0"),
        ({"coef": math.nan}, CoefficientError, "nan"),
        ({"target": math.inf}, CoefficientError, "`target`"),
        ({"convention": "megaton"}, UnknownNameError, "Did you mean 'megatron'"),
        ({"router_logits": []}, InputError, "has no layers"),
        ({"router_logits": torch.zeros(0, T, E)}, InputError, "has no layers"),
        ({"router_logits": torch.zeros(T)}, ShapeError, "[T, E], [L, T, E]"),
        ({"router_logits": [torch.zeros(2, T, E)]}, ShapeError, "flatten(0, -2)"),
        ({"router_logits": [torch.zeros(T, E), torch.zeros(T, E + 1)]}, ShapeError, "layer 1 has shape [23, 9]"),
        ({"router_logits": [torch.zeros(T, E), torch.zeros(T + 1, E)]}, ShapeError, "encoder_layers"),
        ({"router_logits": torch.zeros(L, T, E, dtype=torch.int64)}, InputError, "floating point"),
        ({"mask": torch.ones(T + 1)}, ShapeError, "`mask`"),
        ({"mask": torch.ones(L + 1, T)}, ShapeError, "L = 4"),
        ({"weight": torch.zeros(L, D, E)}, ShapeError, "transposed"),
        ({"capacity": 0}, InputError, "`capacity`"),
        ({"normalizer": -1.0}, InputError, "`normalizer`"),
        ({"normalizer": torch.tensor(-1.0)}, InputError, "`normalizer` is expected to be a number ≥ 0"),
        ({"context": RouterContext(encoder_layers=L)}, InputError, "`encoder_layers`"),
        ({"convention": "olmo_core", "context": RouterContext(model_layers=2)}, InputError, "`model_layers`"),
    ],
)
def test_bad_input_is_explained(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"router_logits": logits(), "coef": 1e-3, "convention": "token_layer_mean", "top_k": 2, **change}
    with pytest.raises(error) as caught:
        zloss.router_loss(arguments.pop("router_logits"), **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("groups", 5, "process group or several, but got int"),
        ("groups", "x", "process group or several, but got str"),
        ("groups", [None], "process group or several, but got NoneType"),
        ("context", 5, "RouterContext, but got int"),
        ("context", {"encoder_layers": 2}, "RouterContext, but got dict"),
    ],
)
def test_groups_and_context_of_a_foreign_type_end_in_a_raw_exception(name: str, value: object, message: str) -> None:
    with pytest.raises(DtypeError, match=f"`{name}` is expected to be .*{message}"):
        router_loss(logits(), coef=1e-3, convention="megatron", top_k=2, **{name: value})


@pytest.mark.parametrize("value", [-1e9, -math.inf, math.nan, 0.5, 2])
@pytest.mark.parametrize("per_layer", [False, True])
def test_an_additive_mask_is_inverted_and_other_numbers_count_as_true(value: float, per_layer: bool) -> None:
    """0 and −1e9 of an additive mask were taken for False and True."""
    mask = torch.where(torch.arange(T) % 3 == 0, 0, value)
    sentence = rf"`mask` is expected to hold booleans, or 0 and 1, .* but got {value}: .*`mask == 0`"
    with pytest.raises(InputError, match=sentence):
        found(logits(), mask=[mask] * L if per_layer else mask)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.uint16, torch.int64, torch.float16, torch.bfloat16, torch.float64]
)
def test_a_mask_of_zeros_and_ones_counts_alike_in_every_dtype(dtype: torch.dtype) -> None:
    mask = torch.arange(T) % 3 != 0
    want = found(logits(), mask=mask)[0]
    assert torch.equal(found(logits(), mask=mask.to(dtype))[0].loss, want.loss)


def test_context_counts_are_checked() -> None:
    with pytest.raises(InputError, match="micro_batches"):
        RouterContext(micro_batches=0)


def test_double_backward_is_refused() -> None:
    logits = torch.randn(1, 5, 4, requires_grad=True)
    loss = zloss.router_loss(3 * logits, coef=0.1, convention="megatron", top_k=1).loss
    with pytest.raises(zloss.errors.DoubleBackwardError, match="first derivatives"):
        torch.autograd.grad(loss, logits, create_graph=True)
