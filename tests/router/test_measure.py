"""The measured scale against models that apply a known convention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.router.literal import LITERAL, Case, SideChannel, violation
from tests.router.tiny_router_model import D, E, T, TinyMoe
from zloss.errors import CoefficientError, MissingInputError
from zloss.router.conventions import router_scale
from zloss.router.measure import MeasuredScale, measure_router_scale

L, K = 4, 2


def measured(model: TinyMoe, name: str, *, target: float = 0.0, coef: float = 1e-3, **options: object) -> MeasuredScale:
    def loss(value: float) -> Tensor:
        main, logits = model()
        case = Case(logits, value, K, target, model_layers=6, encoder_layers=2, labelled=20, micro_batches=3)
        return main + LITERAL[name](case)

    return measure_router_scale(
        lambda: loss(coef), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=coef, **options
    )


@pytest.mark.parametrize("name", [name for name in LITERAL if not name.startswith("megatron")])
@pytest.mark.parametrize(("dtype", "target"), [(torch.float64, 0.0), (torch.float64, 1.7), (torch.float32, 0.0)])
def test_recovers_the_scale_and_target_of_each_convention(name: str, dtype: torch.dtype, target: float) -> None:
    found = measured(TinyMoe(L, dtype=dtype), name, target=target)
    scale = router_scale(
        name,
        layers=L,
        tokens=T,
        top_k=K,
        coef=1e-3,
        model_layers=6,
        encoder_layers=2,
        valid_tokens=20,
        micro_batches=3,
    )
    if name == "hf_nllb_moe":
        assert (found.relative, found.target) == (0.0, None)
        return
    assert found.relative == pytest.approx(scale.relative, rel=1e-3)
    assert found.absolute == pytest.approx(scale.absolute, rel=1e-3)
    assert found.relative_per_layer == pytest.approx(scale.relative_per_layer, rel=1e-3)
    assert found.target == pytest.approx(target, abs=1e-3)
    assert found.residual < 1e-3
    assert found.padding_ratio is None


@pytest.mark.parametrize(("scale", "want"), [(1.0, 4.0), (3.0, 12.0)])
def test_sees_through_a_side_channel_whose_scalar_is_silent(scale: float, want: float) -> None:
    """Each layer's logits pass through a scaler that injects its Z gradient; the returned loss never shows it."""
    model = TinyMoe(L)

    def loss(coef: float) -> Tensor:
        hidden, silent = model.inputs, []
        for router, experts in zip(model.routers, model.experts, strict=True):
            logits = hidden @ router.T
            logits = SideChannel.apply(logits, coef * violation(logits, 0.0).mean())
            silent.append(logits)
            outputs = torch.einsum("td,edf->tef", hidden, experts)
            hidden = torch.tanh(hidden + 0.5 * (logits.softmax(dim=-1).unsqueeze(-1) * outputs).sum(dim=1))
        return hidden.square().mean()

    SideChannel.scale = scale
    assert (
        float(loss(1e-3).detach()) == float(loss(0.0).detach()) == pytest.approx(float(model()[0].detach()), rel=1e-12)
    )
    found = measure_router_scale(
        lambda: loss(1e-3), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=1e-3
    )
    assert found.relative == pytest.approx(want, rel=1e-3)
    assert found.residual < 1e-6


def test_padding_that_is_counted_is_found_out() -> None:
    mask = torch.arange(T) < 20
    counted = measured(TinyMoe(L), "flaxformer", mask=mask)
    assert counted.relative_all == pytest.approx(1.0, rel=1e-3)
    assert counted.relative == pytest.approx(20 / T, rel=1e-3)
    assert counted.padding_ratio == pytest.approx(1.0, rel=1e-3)


def test_padding_that_is_excluded_has_ratio_zero() -> None:
    model, mask = TinyMoe(L), torch.arange(T) < 20

    def loss(coef: float) -> Tensor:
        main, logits = model()
        return main + coef * torch.stack([violation(layer[mask], 0.0).mean() for layer in logits]).sum()

    found = measure_router_scale(
        lambda: loss(1e-3), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=1e-3, mask=mask
    )
    assert found.relative == pytest.approx(L, rel=1e-3)
    assert found.padding_ratio == pytest.approx(0.0, abs=1e-3)


def test_two_coefficients_serve_as_well_as_on_and_off() -> None:
    model = TinyMoe(L)

    def loss(coef: float) -> Tensor:
        main, logits = model()
        return main + LITERAL["mesh_tf"](Case(logits, coef, K, 0.0, 4, 1, T, 1))

    found = measure_router_scale(
        lambda: loss(3e-3), lambda: loss(1e-3), lambda: model()[1], list(model.routers), coef=3e-3, coef_off=1e-3
    )
    assert found.relative == pytest.approx(L, rel=1e-3)
    assert found.coef == pytest.approx(2e-3)


def test_dropout_cancels_under_one_seed() -> None:
    found = measured(TinyMoe(L, dropout=0.3).train(), "olmoe")
    assert found.relative == pytest.approx(1 / K, rel=1e-3)


def test_an_unequal_weight_on_layers_is_resolved() -> None:
    model = TinyMoe(L)
    share = [1.0, 0.0, 2.0, 5.0]

    def loss(coef: float) -> Tensor:
        main, logits = model()
        terms = [weight * violation(layer, 0.0).mean() for weight, layer in zip(share, logits, strict=True)]
        return main + coef * torch.stack(terms).sum()

    found = measure_router_scale(
        lambda: loss(1.0), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=1.0
    )
    assert found.relative_per_layer == pytest.approx([L * weight for weight in share], rel=1e-6, abs=1e-9)


def test_a_penalty_of_another_kind_leaves_a_residual() -> None:
    model = TinyMoe(L)

    def loss(coef: float) -> Tensor:
        main, logits = model()
        return main + coef * sum(layer.square().mean() for layer in logits)

    found = measure_router_scale(
        lambda: loss(1.0), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=1.0
    )
    assert found.residual > 0.1


def test_a_max_shifted_log_normalizer_leaves_a_residual() -> None:
    """log Z after subtracting the row maximum, never restored, is another quantity and is not mistaken for one."""
    model = TinyMoe(L)

    def loss(coef: float) -> Tensor:
        main, logits = model()
        shifted = [layer - layer.amax(dim=1, keepdim=True) for layer in logits]
        return main + coef * sum(violation(layer, 0.0).mean() for layer in shifted)

    found = measure_router_scale(
        lambda: loss(1.0), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=1.0
    )
    assert found.residual > 0.1


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (0.5, 2.0, 1.0, 0.0)])
def test_a_missing_square_is_named_and_not_read_as_a_far_target(weights: tuple[float, ...]) -> None:
    """λ·mean(log Z) fits a square with c → −∞ perfectly; it must not be read as one, nor as nothing."""
    model = TinyMoe(L)

    def loss(coef: float) -> Tensor:
        main, logits = model()
        return main + coef * sum(w * torch.logsumexp(layer, 1).mean() for w, layer in zip(weights, logits, strict=True))

    found = measure_router_scale(
        lambda: loss(1e-3), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=1e-3
    )
    assert (found.verdict, found.target) == ("not_squared", None)
    assert found.relative_per_layer == pytest.approx([L * w for w in weights], rel=1e-6, abs=1e-9)
    assert "not of its square" in found.sentence


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_square_over_log_z_that_hardly_varies_is_not_called_a_missing_one(dtype: torch.dtype) -> None:
    """Small routers: log Z is within a few 0.01 of log E, and the slope of the square explains nearly all."""
    model = TinyMoe(L, dtype=dtype)
    with torch.no_grad():
        for router in model.routers:
            router.mul_(0.05)
    found = measured(model, "mesh_tf")
    assert found.verdict == "explained"
    assert found.relative == pytest.approx(L, rel=1e-2)


def test_the_residual_comes_with_a_verdict() -> None:
    right = measured(TinyMoe(L), "mesh_tf")
    assert right.verdict == "explained"
    assert "explains the gradient" in right.sentence
    model = TinyMoe(L)

    def other(coef: float) -> Tensor:
        main, logits = model()
        return main + coef * sum(layer.square().mean() for layer in logits)

    wrong = measure_router_scale(
        lambda: other(1.0), lambda: other(0.0), lambda: model()[1], list(model.routers), coef=1.0
    )
    assert wrong.verdict == "unexplained"
    assert "no scale can be stated" in wrong.sentence
    none = measure_router_scale(
        lambda: model()[0], lambda: model()[0], lambda: model()[1], list(model.routers), coef=1.0
    )
    assert (none.verdict, none.relative) == ("nothing_applied", 0.0)


def mean_of_squares(log_z: Tensor) -> Tensor:
    return log_z.square().mean()


def square_of_the_mean(log_z: Tensor) -> Tensor:
    return log_z.mean().square()


def measured_penalty(
    model: TinyMoe, penalty: Callable[[Tensor], Tensor], *, coef: float = 1.0, sign: float = 1.0, **options: object
) -> MeasuredScale:
    """What is found of the layer mean of `penalty(log Z)`."""

    def loss(value: float) -> Tensor:
        main, logits = model()
        terms = [penalty(torch.logsumexp(layer.float(), dim=1)) for layer in logits]
        return main + sign * value * torch.stack(terms).mean()

    return measure_router_scale(
        lambda: loss(coef), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=coef, **options
    )


def scaled(model: TinyMoe, factor: float) -> TinyMoe:
    with torch.no_grad():
        for router in model.routers:
            router.mul_(factor)
    return model


@pytest.mark.parametrize("factor", [1.0, 0.3, 0.01, 0.001])
def test_the_rounding_of_bf16_was_taken_for_another_penalty(factor: float) -> None:
    """s = 0.9999 at a residual of 0.2 % got "no scale can be stated"."""
    found = measured_penalty(scaled(TinyMoe(L, dtype=torch.bfloat16), factor), mean_of_squares)
    assert found.verdict == "explained"
    assert found.relative == pytest.approx(1.0, abs=0.02)
    assert found.target == pytest.approx(0.0, abs=0.02)
    assert 1e-3 < found.residual < found.limit < 0.03
    assert "that rounding can leave" in found.sentence


def test_bf16_products_that_a_router_returns_as_fp32_were_taken_for_another_penalty() -> None:
    model = TinyMoe(L, dtype=torch.float32)

    def loss(coef: float) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            main, logits = model()
        return main + coef * torch.stack([violation(layer.float(), 0.0).mean() for layer in logits]).mean()

    def logits() -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [layer.float() for layer in model()[1]]

    found = measure_router_scale(lambda: loss(1.0), lambda: loss(0.0), logits, list(model.routers), coef=1.0)
    assert found.residual > 1e-3
    assert found.verdict == "explained"
    assert found.relative == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("penalty", [lambda z: z.abs().pow(1.5).mean(), lambda z: z.pow(4).mean()])
def test_rounding_does_not_excuse_another_penalty(penalty: Callable[[Tensor], Tensor]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert measured_penalty(TinyMoe(L, dtype=dtype), penalty).verdict == "unexplained"


def test_a_main_loss_that_drowns_the_penalty_in_rounding_is_no_evidence_against_it() -> None:
    found = measured_penalty(TinyMoe(L, dtype=torch.bfloat16), mean_of_squares, coef=1e-3)
    assert (found.verdict, found.target) == ("undetermined", None)
    assert found.limit > 0.1
    assert "larger coefficient" in found.sentence


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.01, 0.001])
@pytest.mark.parametrize("target", ["fit", 0.0])
def test_the_square_of_the_mean_passed_for_another_penalty(
    dtype: torch.dtype, factor: float, target: float | str
) -> None:
    """One batch shows only that every decision has the same source: it was called a mean without a square, and where log Z
    hardly varies the mean of squares."""
    model = scaled(TinyMoe(L, dtype=dtype), factor)
    before = [router.detach().clone() for router in model.routers]
    squared = measured_penalty(model, square_of_the_mean, target=target)
    assert squared.verdict == "squared_mean"
    assert "square of the mean" in squared.sentence
    assert squared.target == pytest.approx(0.0, abs=0.02)
    assert squared.relative == pytest.approx(1.0, abs=0.02)
    assert measured_penalty(model, mean_of_squares, target=target).verdict == "explained"
    assert measured_penalty(model, torch.mean, target=target).verdict == "not_squared"
    assert all(torch.equal(a, b) for a, b in zip(model.routers, before, strict=True))


def test_the_square_of_the_mean_over_all_layers_is_found_too() -> None:
    model = TinyMoe(L)

    def loss(coef: float) -> Tensor:
        main, logits = model()
        return main + coef * torch.logsumexp(torch.cat(list(logits)), dim=1).mean().square()

    found = measure_router_scale(
        lambda: loss(1.0), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=1.0
    )
    assert found.verdict == "squared_mean"


def test_what_no_batch_can_tell_apart_is_not_claimed() -> None:
    """Logits that do not depend on the scale of the weights: log Z is the same constant in every batch."""
    weights = [torch.zeros(E, D, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    inputs = torch.randn(T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def logits() -> list[Tensor]:
        return [inputs @ weight.T for weight in weights]

    for penalty in (mean_of_squares, square_of_the_mean, torch.mean):
        found = measure_router_scale(
            lambda penalty=penalty: torch.stack([penalty(torch.logsumexp(layer, 1)) for layer in logits()]).mean(),
            lambda: sum(layer.sum() * 0 for layer in logits()),
            logits,
            weights,
            coef=1.0,
        )
        assert (found.verdict, found.target) == ("undetermined", None)
        assert found.sentence.startswith("This batch cannot tell which penalty is applied")


def test_a_negative_scale_got_no_warning() -> None:
    found = measured_penalty(TinyMoe(L), mean_of_squares, sign=-1.0)
    assert found.verdict == "explained"
    assert found.relative == pytest.approx(-1.0, rel=1e-3)
    assert found.negative_layers == (0, 1, 2, 3)
    assert "Warning: the scale is negative, so that training drives log Z_R away from c" in found.sentence
    assert "Warning" not in measured_penalty(TinyMoe(L), mean_of_squares).sentence


def test_one_negative_layer_is_named() -> None:
    model = TinyMoe(L)

    def loss(coef: float) -> Tensor:
        main, logits = model()
        signs = (1.0, 1.0, -0.5, 0.0)
        terms = [sign * violation(layer, 0.0).mean() for sign, layer in zip(signs, logits, strict=True)]
        return main + coef * torch.stack(terms).sum()

    found = measure_router_scale(
        lambda: loss(1.0), lambda: loss(0.0), lambda: model()[1], list(model.routers), coef=1.0
    )
    assert found.negative_layers == (2,)
    assert "the scale of layer 2 is negative" in found.sentence


def test_bad_input() -> None:
    model = TinyMoe(1)
    zero = torch.zeros((), requires_grad=True)
    with pytest.raises(CoefficientError, match="expected to differ"):
        measure_router_scale(
            lambda: zero, lambda: zero, lambda: model()[1], list(model.routers), coef=1.0, coef_off=1.0
        )
    with pytest.raises(MissingInputError, match="router weights"):
        measure_router_scale(lambda: zero, lambda: zero, lambda: model()[1], [], coef=1.0)
