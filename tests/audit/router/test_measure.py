"""The measured scale against models that apply a known convention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.audit.router.tiny_router_model import T, TinyMoe
from tests.source.router.literal import LITERAL, Case, SideChannel, violation
from zloss.audit.router.measure import MeasuredScale, measure_router_scale
from zloss.errors import CoefficientError, MissingInputError
from zloss.source.router.scale import router_scale

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


def test_bad_input() -> None:
    model = TinyMoe(1)
    zero = torch.zeros((), requires_grad=True)
    with pytest.raises(CoefficientError, match="expected to differ"):
        measure_router_scale(
            lambda: zero, lambda: zero, lambda: model()[1], list(model.routers), coef=1.0, coef_off=1.0
        )
    with pytest.raises(MissingInputError, match="router weights"):
        measure_router_scale(lambda: zero, lambda: zero, lambda: model()[1], [], coef=1.0)
